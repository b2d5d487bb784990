//! What every attempt of every client was told, and the judgement over it.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use pgonce_testkit::history::{Final, History, Seen, check};
use tokio_postgres::Client;

use crate::http::{Got, Reply, send};

/// The scope of a gateway whose routes name none.
pub const SCOPE: &str = "http";
/// How long a client comes again.
const LIMIT: Duration = Duration::from_secs(20);
/// Between two attempts of a client that does not heed Retry-After.
const PAUSE: Duration = Duration::from_millis(15);
/// Problems that the same request will not get out of by coming again.
const DEFINITE: [&str; 5] = ["uncertain", "response-not-stored", "result-expired", "failed-before", "conflict"];

/// A request of a client.
#[derive(Debug, Clone)]
pub struct Order<'a> {
    pub path: &'a str,
    pub tenant: &'a str,
    pub key: &'a str,
    pub body: &'a str,
}

impl<'a> Order<'a> {
    pub fn new(key: &'a str) -> Self {
        Self { path: "/orders", tenant: "", key, body: "{}" }
    }
}

/// What an attempt was told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Told {
    /// 2xx.
    Ok(Reply),
    Problem {
        slug: String,
        effect: String,
        status: u16,
    },
    /// Something of the service's that is no success.
    Other(Reply),
    Cut(String),
    Refused,
}

impl Told {
    pub fn slug(&self) -> &str {
        match self {
            Self::Problem { slug, .. } => slug,
            _ => "",
        }
    }

    pub fn ok(&self) -> &Reply {
        match self {
            Self::Ok(reply) => reply,
            other => panic!("not done: {other:?}"),
        }
    }

    pub fn is_definite(&self) -> bool {
        matches!(self, Self::Ok(_)) || DEFINITE.contains(&self.slug())
    }
}

/// All attempts.
#[derive(Debug, Default)]
pub struct Book {
    history: History,
    /// Attempts that were told that they did nothing and never will, and by which words.
    not_done: Mutex<BTreeMap<String, String>>,
    count: AtomicUsize,
}

impl Book {
    /// One attempt, recorded. It has a number, which the service writes into its effect.
    pub async fn attempt(&self, gateway: &str, order: &Order<'_>) -> Told {
        let attempt = self.count.fetch_add(1, Ordering::SeqCst).to_string();
        let key = format!("\"{}\"", order.key);
        let headers = [("idempotency-key", key.as_str()), ("x-tenant", order.tenant), ("x-attempt", &attempt)];
        let told = match send(gateway, "POST", order.path, &headers, order.body).await {
            Got::Refused => Told::Refused,
            Got::Cut(why) => Told::Cut(why),
            Got::Reply(reply) if (200..300).contains(&reply.status) => Told::Ok(reply),
            Got::Reply(reply) => match reply.problem() {
                Some((slug, effect)) => Told::Problem { slug, effect, status: reply.status },
                None => Told::Other(reply),
            },
        };
        self.history.record(
            SCOPE,
            order.key,
            match &told {
                Told::Ok(reply) => Seen::Ok(reply.body.clone()),
                Told::Problem { effect, slug, .. } if effect == "not_done" => {
                    self.not_done.lock().unwrap().insert(attempt, format!("{} was told {slug}", order.key));
                    Seen::Fail
                }
                _ => Seen::Unknown,
            },
        );
        told
    }

    /// Comes again with the same key, from gateway to gateway, until told something definite.
    pub async fn until_definite(&self, gateways: &[&str], order: &Order<'_>) -> Told {
        let deadline = Instant::now() + LIMIT;
        for turn in 0.. {
            let told = self.attempt(gateways[turn % gateways.len()], order).await;
            if told.is_definite() {
                return told;
            }
            assert!(Instant::now() < deadline, "{order:?}: nothing definite in {LIMIT:?}, last {told:?}");
            tokio::time::sleep(PAUSE).await;
        }
        unreachable!()
    }

    /// Holds everything against the database. `waived`: what the policy under test does not promise.
    pub async fn judge(&self, client: &Client, waived: &[&str]) {
        let state = Final::read(client).await;
        let events = self.history.events();
        assert!(!events.is_empty() && !state.rows.is_empty(), "nothing to judge");
        let mut found: Vec<String> = check(&events, &state)
            .into_iter()
            .filter(|violation| !waived.contains(&violation.invariant))
            .map(|violation| format!("{}: {}", violation.invariant, violation.what))
            .collect();
        for row in client.query("SELECT invariant || ': ' || what FROM public.broken", &[]).await.unwrap() {
            found.push(row.get(0));
        }
        let not_done = self.not_done.lock().unwrap().clone();
        for row in client.query("SELECT attempt FROM public.effect", &[]).await.unwrap() {
            if let Some(told) = not_done.get(row.get::<_, &str>(0)) {
                found.push(format!("I3: the effect is there, and {told}"));
            }
        }
        assert!(found.is_empty(), "{found:#?}");
    }
}

/// What the judgement needs in the database: which attempt made an effect, and a witness of every change of a row.
/// I6: what is terminal stays. I7: a claim id is used once. I8: no takeover while the lease runs.
pub const WITNESS: &str = "
    ALTER TABLE public.effect ADD COLUMN attempt text NOT NULL DEFAULT '';
    CREATE TABLE public.broken (invariant text, what text);
    CREATE TABLE public.claim_seen (claim_id uuid PRIMARY KEY);
    CREATE FUNCTION public.witness() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
    BEGIN
        IF TG_OP <> 'INSERT' AND OLD.status IN ('succeeded', 'failed_final') THEN
            INSERT INTO public.broken VALUES ('I6', format('%s: %s of a row that was %s', OLD.key, TG_OP, OLD.status));
        END IF;
        IF TG_OP = 'DELETE' THEN
            RETURN NULL;
        END IF;
        IF TG_OP = 'UPDATE' AND NEW.claim_id = OLD.claim_id THEN
            RETURN NULL;
        END IF;
        IF TG_OP = 'UPDATE' AND OLD.status = 'processing' AND NEW.status = 'processing'
           AND OLD.locked_until > once.clock() THEN
            INSERT INTO public.broken VALUES ('I8', NEW.key || ': taken over while its lease ran');
        END IF;
        INSERT INTO public.claim_seen VALUES (NEW.claim_id) ON CONFLICT DO NOTHING;
        IF NOT FOUND THEN
            INSERT INTO public.broken VALUES ('I7', NEW.key || ': a claim id for the second time');
        END IF;
        RETURN NULL;
    END $$;
    CREATE TRIGGER witness AFTER INSERT OR UPDATE OR DELETE ON once.intent
        FOR EACH ROW EXECUTE FUNCTION public.witness()";
