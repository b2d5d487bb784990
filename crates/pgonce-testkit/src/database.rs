//! One cluster a test process, one database a test.

use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

use pgonce::{Once, Settings};
use pgonce_cluster::{Binaries, Cluster};
use tokio_postgres::Client;

static CLUSTER: OnceLock<Mutex<Cluster>> = OnceLock::new();
static TEMPLATE: tokio::sync::OnceCell<()> = tokio::sync::OnceCell::const_new();

/// A cluster of the caller's own, durable, for tests that kill it.
#[must_use]
pub fn cluster() -> Cluster {
    let binaries = Binaries::find().expect("PostgreSQL server binaries (make test installs them)");
    Cluster::temporary_with(&binaries, |options| {
        // Durable: what is tested here are promises about durability.
        options.settings.push(("max_connections".into(), "200".into()));
        options.settings.push(("log_min_messages".into(), "fatal".into()));
    })
    .expect("a private PostgreSQL")
}

fn shared_url(database: &str) -> String {
    let cluster = CLUSTER.get_or_init(|| Mutex::new(cluster()));
    cluster.lock().unwrap_or_else(std::sync::PoisonError::into_inner).url(database)
}

/// A database of the test's own, with the schema in it.
#[derive(Debug)]
pub struct TestDb {
    name: String,
    url: String,
    pgbouncer: Option<String>,
    direct: Option<bool>,
}

impl TestDb {
    /// A new database, cloned from a migrated template. Where `PGONCE_TEST_PGBOUNCER` names a PgBouncer's
    /// address, [`TestDb::url`] goes through it.
    pub async fn new() -> Self {
        let admin_url = tokio::task::spawn_blocking(|| shared_url("postgres")).await.unwrap();
        TEMPLATE
            .get_or_init(|| async {
                let admin = connect(&admin_url).await;
                admin.batch_execute("CREATE DATABASE once_template TEMPLATE template0 ENCODING 'UTF8'").await.unwrap();
                let mut template = connect(&shared_url("once_template")).await;
                pgonce::migrate::apply(&mut template, false).await.unwrap();
                template.batch_execute(EFFECTS).await.unwrap();
                drop(template);
                // A template cannot be cloned while somebody is connected to it.
                eventually("the template is left", async || {
                    let sql = "SELECT count(*) = 0 FROM pg_stat_activity WHERE datname = 'once_template'";
                    admin.query_one(sql, &[]).await.unwrap().get(0)
                })
                .await;
            })
            .await;
        let name = format!("t_{}", uuid::Uuid::new_v4().simple());
        let admin = connect(&admin_url).await;
        admin.batch_execute(&format!("CREATE DATABASE {name} TEMPLATE once_template")).await.unwrap();
        let url = shared_url(&name);
        let pgbouncer = std::env::var("PGONCE_TEST_PGBOUNCER").ok().map(|_| bouncer::url(&name));
        Self { name, url, pgbouncer, direct: None }
    }

    /// Makes [`TestDb::once`] go through one door: the direct statements, or the functions.
    #[must_use]
    pub fn through(mut self, direct: bool) -> Self {
        self.direct = Some(direct);
        self
    }

    /// Where applications connect: PostgreSQL, or the pooler before it.
    #[must_use]
    pub fn url(&self) -> &str {
        self.pgbouncer.as_deref().unwrap_or(&self.url)
    }

    /// PostgreSQL itself.
    #[must_use]
    pub fn direct_url(&self) -> &str {
        &self.url
    }

    /// The database's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// A plain connection.
    pub async fn client(&self) -> Client {
        connect(&self.url).await
    }

    /// The crate, connected.
    pub async fn once(&self) -> Once {
        self.once_with(|_| {}).await
    }

    /// The crate, with other settings.
    pub async fn once_with(&self, change: impl FnOnce(&mut Settings)) -> Once {
        let mut settings = Settings::from_url(self.url());
        settings.direct = self.direct;
        change(&mut settings);
        Once::with_settings(settings).await.unwrap()
    }

    /// Moves the database's clock, as pgonce reads it, by so much from the real one.
    pub async fn travel(&self, ahead: Duration) {
        let sql = format!(
            "CREATE OR REPLACE FUNCTION once.clock() RETURNS timestamptz LANGUAGE sql VOLATILE
             AS 'SELECT pg_catalog.clock_timestamp() + interval ''{} days {}.{:06} seconds'''",
            ahead.as_secs() / 86_400,
            ahead.as_secs() % 86_400,
            ahead.subsec_micros()
        );
        self.client().await.batch_execute(&sql).await.unwrap();
    }

    /// How many effects are there for a key.
    pub async fn effects(&self, key: &str) -> i64 {
        let sql = "SELECT count(*) FROM public.effect WHERE key = $1";
        self.client().await.query_one(sql, &[&key]).await.unwrap().get(0)
    }

    /// What the intent's row says.
    pub async fn status(&self, scope: &str, key: &str) -> Option<String> {
        let sql = "SELECT status FROM once.intents WHERE tenant = '' AND scope = $1 AND key = $2";
        self.client().await.query_opt(sql, &[&scope, &key]).await.unwrap().map(|row| row.get(0))
    }
}

/// The effect under test: a row that carries tenant, scope, key and claim id, with nothing unique about it,
/// so that a second effect shows.
const EFFECTS: &str = "CREATE TABLE public.effect (tenant text NOT NULL DEFAULT '', scope text NOT NULL,
    key text NOT NULL, claim_id uuid NOT NULL, at timestamptz NOT NULL DEFAULT clock_timestamp());
    GRANT ALL ON public.effect TO PUBLIC";

async fn connect(url: &str) -> Client {
    let (client, connection) = tokio_postgres::connect(url, tokio_postgres::NoTls).await.expect("connect");
    tokio::spawn(connection);
    client
}

/// Polls until the condition holds; panics after ten seconds.
pub async fn eventually(what: &str, mut condition: impl AsyncFnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while !condition().await {
        assert!(Instant::now() < deadline, "did not happen in time: {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// Waits until exactly so many sessions of this database wait for a lock.
pub async fn lock_waiters(observer: &Client, count: i64) {
    eventually(&format!("{count} lock waiters"), async || {
        let sql =
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'";
        observer.query_one(sql, &[]).await.unwrap().get::<_, i64>(0) == count
    })
    .await;
}

mod bouncer {
    //! A PgBouncer in transaction mode before the shared cluster.

    use std::io::Write as _;
    use std::process::{Child, Command, Stdio};
    use std::sync::OnceLock;

    static BOUNCER: OnceLock<(u16, Child)> = OnceLock::new();

    pub(super) fn url(database: &str) -> String {
        let (port, _) = BOUNCER.get_or_init(start);
        format!("postgres://postgres@127.0.0.1:{port}/{database}?sslmode=disable&pgbouncer=true")
    }

    fn start() -> (u16, Child) {
        let port = crate::free_port();
        let upstream: tokio_postgres::Config = super::shared_url("postgres").parse().unwrap();
        let upstream_port = upstream.get_ports()[0];
        let dir = std::env::temp_dir().join(format!("pgonce-bouncer-{port}"));
        std::fs::create_dir_all(&dir).unwrap();
        let users = dir.join("users.txt");
        std::fs::write(&users, "\"postgres\" \"\"\n").unwrap();
        let config = dir.join("pgbouncer.ini");
        let mut file = std::fs::File::create(&config).unwrap();
        write!(
            file,
            "[databases]\n* = host=127.0.0.1 port={upstream_port}\n[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\n\
             unix_socket_dir =\nauth_type = trust\nauth_file = {}\npool_mode = transaction\ndefault_pool_size = 20\n\
             max_client_conn = 500\nmax_db_connections = 60\nlogfile =\n",
            users.display()
        )
        .unwrap();
        drop(file);
        // It refuses to run as root.
        let program =
            if std::fs::metadata("/proc/self").is_ok_and(|meta| std::os::unix::fs::MetadataExt::uid(&meta) == 0) {
                vec!["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups", "pgbouncer"]
            } else {
                vec!["pgbouncer"]
            };
        let open: std::fs::Permissions = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(&dir, open).unwrap();
        let child = Command::new(program[0])
            .args(&program[1..])
            .arg(&config)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("pgbouncer (make test-matrix installs it)");
        // Goes with the test process: the watchdog waits for our pid to vanish.
        let _ = Command::new("sh")
            .args([
                "-c",
                &format!("while kill -0 {} 2>/dev/null; do sleep 1; done; kill {}", std::process::id(), child.id()),
            ])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
        while std::net::TcpStream::connect(("127.0.0.1", port)).is_err() {
            assert!(std::time::Instant::now() < deadline, "pgbouncer did not start");
            std::thread::yield_now();
        }
        (port, child)
    }
}
