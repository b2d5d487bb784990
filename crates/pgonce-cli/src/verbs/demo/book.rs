//! What the database says of the demo's orders and deliveries, chapter by chapter.

use std::sync::Arc;
use std::time::{Duration, Instant};

use pgonce::Error;
use tokio_postgres::Client;
use tokio_postgres::types::Type;
use uuid::Uuid;

use crate::database;

/// Whatever runs for days is counted and cleared away by the chapter.
const CHAPTER: Duration = Duration::from_secs(60);
/// Longer than a delivery that was not acknowledged takes to come again: a second effect would be seen.
const CLOSING_MIN: Duration = Duration::from_secs(15);
/// A chapter whose messages have not come by then is counted as it is.
const CLOSING_MAX: Duration = Duration::from_secs(120);

/// One statement, one snapshot. In the order of bytes '.' follows '-': the range is the chapter's keys.
const COUNT: &str = "
SELECT jsonb_build_object(
    'effects', (SELECT count(*) FROM pgonce_demo.orders o WHERE o.chapter = $1),
    'emitted', (SELECT count(o.message_id) FROM pgonce_demo.orders o WHERE o.chapter = $1),
    'delivered', (SELECT count(*) FROM pgonce_demo.deliveries d WHERE d.chapter = $1),
    'arrived', (SELECT count(DISTINCT d.message_id) FROM pgonce_demo.deliveries d WHERE d.chapter = $1),
    'intents', (SELECT count(*) FROM once.intents i WHERE i.tenant = '' AND i.scope = 'pgonce_demo'
                AND i.key >= $1 || '-' AND i.key < $1 || '.' AND i.status = 'succeeded'))";

/// What the database says.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counted {
    pub effects: i64,
    pub intents: i64,
    pub emitted: i64,
    /// Effects at the consumer,
    pub delivered: i64,
    /// and of how many messages they are.
    pub arrived: i64,
}

impl std::ops::Add for Counted {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            effects: self.effects + other.effects,
            intents: self.intents + other.intents,
            emitted: self.emitted + other.emitted,
            delivered: self.delivered + other.delivered,
            arrived: self.arrived + other.arrived,
        }
    }
}

impl Counted {
    /// One delivery for each order: none missing, none twice.
    pub fn is_delivered(self) -> bool {
        self.delivered == self.effects && self.arrived == self.delivered
    }

    /// Whether nothing more will come: what was doubled on the way in does not keep us waiting.
    pub fn has_arrived(self) -> bool {
        self.arrived >= self.intents
    }
}

/// The chapters: the open one, those whose last commands and messages are still on their way, and the sum of the others.
pub struct Book {
    open: Arc<str>,
    opened: Instant,
    closing: Vec<(Arc<str>, Instant)>,
    closed: Counted,
}

impl Book {
    pub fn new() -> Self {
        Self { open: chapter_name(), opened: Instant::now(), closing: Vec::new(), closed: Counted::default() }
    }

    pub fn open_chapter(&mut self) -> Arc<str> {
        if self.opened.elapsed() >= CHAPTER {
            self.closing.push((std::mem::replace(&mut self.open, chapter_name()), Instant::now()));
            self.opened = Instant::now();
        }
        Arc::clone(&self.open)
    }

    /// Everything so far. A closed chapter that is right leaves both tables; its intents go with their window. One that
    /// is wrong stays, for whoever wants to see it.
    pub async fn count(&mut self, observer: &Client) -> Result<Counted, Error> {
        let mut all = self.closed + count(observer, &self.open).await?;
        for (chapter, since) in std::mem::take(&mut self.closing) {
            // Asked before it is counted: all that was sent is then there.
            let is_sent = Arc::strong_count(&chapter) == 1;
            let counted = count(observer, &chapter).await?;
            all = all + counted;
            let limit = if counted.has_arrived() { CLOSING_MIN } else { CLOSING_MAX };
            if !is_sent || since.elapsed() < limit {
                self.closing.push((chapter, since));
                continue;
            }
            self.closed = self.closed + counted;
            if counted.effects == counted.intents && counted.is_delivered() {
                for table in ["orders", "deliveries"] {
                    let sql = format!("DELETE FROM pgonce_demo.{table} WHERE chapter = $1");
                    observer.execute_typed(&sql, &[(&&*chapter, Type::TEXT)]).await?;
                }
            }
        }
        Ok(all)
    }
}

/// Whether no order of any chapter, of this demo or an earlier one, is still on its way.
pub async fn is_all_there(observer: &Client) -> Result<bool, Error> {
    let sql = "SELECT to_jsonb(NOT EXISTS (SELECT FROM pgonce_demo.orders o WHERE o.message_id IS NOT NULL
        AND NOT EXISTS (SELECT FROM pgonce_demo.deliveries d WHERE d.message_id = o.message_id::text)))";
    Ok(database::json_row(observer, sql, &[]).await?.as_bool().unwrap_or(false))
}

fn chapter_name() -> Arc<str> {
    format!("demo_{}", Uuid::new_v4().simple()).into()
}

async fn count(observer: &Client, chapter: &str) -> Result<Counted, Error> {
    let row = database::json_row(observer, COUNT, &[(&chapter, Type::TEXT)]).await?;
    let read = |field: &str| row[field].as_i64().unwrap_or(0);
    Ok(Counted {
        effects: read("effects"),
        intents: read("intents"),
        emitted: read("emitted"),
        delivered: read("delivered"),
        arrived: read("arrived"),
    })
}

#[cfg(test)]
mod tests {
    use pgonce_testkit::TestDb;

    use super::*;

    /// A chapter with one order, closed so long ago.
    async fn closed(client: &Client, book: &mut Book, once: &pgonce::Once) -> Arc<str> {
        let chapter = chapter_name();
        let key = format!("{chapter}-1");
        once.intent("pgonce_demo", &key).run(async |_| Ok(1)).await.unwrap();
        let sql = "INSERT INTO pgonce_demo.orders (chapter, key, amount, claim_id, message_id)
            VALUES ($1, $2, 1, gen_random_uuid(), gen_random_uuid())";
        client.execute(sql, &[&&*chapter, &key]).await.unwrap();
        let since = Instant::now().checked_sub(CLOSING_MIN).unwrap();
        book.closing.push((Arc::clone(&chapter), since));
        chapter
    }

    async fn deliver(client: &Client, chapter: &str) {
        let sql = "INSERT INTO pgonce_demo.deliveries (chapter, key, message_id)
            SELECT o.chapter, o.key, o.message_id::text FROM pgonce_demo.orders o WHERE o.chapter = $1";
        client.execute(sql, &[&chapter]).await.unwrap();
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_chapter_leaves_both_tables_when_it_has_arrived_and_is_right() {
        let db = TestDb::new().await;
        let client = db.client().await;
        client.batch_execute(super::super::PREPARE).await.unwrap();
        let once = pgonce::Once::connect(db.url()).await.unwrap();
        let mut book = Book::new();
        let left = async |table: &str| -> i64 {
            client.query_one(&format!("SELECT count(*) FROM pgonce_demo.{table}"), &[]).await.unwrap().get(0)
        };

        let chapter = closed(&client, &mut book, &once).await;
        deliver(&client, &chapter).await;
        book.count(&client).await.unwrap();
        assert_eq!(book.closing.len(), 1, "somebody still sends");
        drop(chapter);
        let all = book.count(&client).await.unwrap();
        assert!(all.is_delivered() && all.effects == 1 && book.closing.is_empty(), "{all:?}");
        assert_eq!((left("orders").await, left("deliveries").await), (0, 0));
        assert_eq!(book.count(&client).await.unwrap(), all, "and stays counted");

        let late = closed(&client, &mut book, &once).await.to_string();
        let all = book.count(&client).await.unwrap();
        assert!(!all.has_arrived() && book.closing.len() == 1, "a message is on its way: {all:?}");
        deliver(&client, &late).await;
        deliver(&client, &late).await;
        let all = book.count(&client).await.unwrap();
        assert!(!all.is_delivered() && all.has_arrived() && book.closing.is_empty(), "{all:?}");
        assert_eq!((left("orders").await, left("deliveries").await), (1, 2), "what is wrong stays to be seen");
    }
}
