//! The database over TLS: encrypted where it is asked for, checked where that is asked for, and the same promises.

use pgonce::{Error, Failure, Once, Outcome, Settings};
use pgonce_cluster::Cluster;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use tempfile::TempDir;

/// A server that speaks TLS, and its authority's certificate.
struct Secured {
    _cluster: Cluster,
    dir: TempDir,
    url: String,
}

impl Secured {
    async fn new() -> Self {
        let cluster = tokio::task::spawn_blocking(pgonce_testkit::cluster).await.unwrap();
        let url = cluster.url("postgres");
        let mut client = pgonce::migrate::connect(&url).await.unwrap();
        pgonce::migrate::apply(&mut client, false).await.unwrap();
        client.batch_execute("CREATE TABLE public.effect (key text)").await.unwrap();
        let dir = tempfile::tempdir().unwrap();
        let (root, signed) = (authority(), KeyPair::generate().unwrap());
        let named = CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
        let certificate = named.signed_by(&signed, &root).unwrap();
        std::fs::write(dir.path().join("ca.pem"), root.pem()).unwrap();
        std::fs::write(dir.path().join("other.pem"), authority().pem()).unwrap();
        // Written by the server itself, which runs as another user: only its owner may read the key.
        for (file, pem) in [("server.crt", certificate.pem()), ("server.key", signed.serialize_pem())] {
            let copy = format!(
                "COPY (SELECT unnest(string_to_array('{}', E'\\n'))) TO PROGRAM 'umask 077; cat > {file}'",
                pem.trim_end()
            );
            client.batch_execute(&copy).await.unwrap();
        }
        client.batch_execute("ALTER SYSTEM SET ssl = on").await.unwrap();
        client.batch_execute("SELECT pg_reload_conf()").await.unwrap();
        let (rest, port) = (url.split('?').next().unwrap(), cluster.port());
        let user = rest.split("//").nth(1).and_then(|rest| rest.split('@').next()).unwrap();
        let url = format!("postgres://{user}@localhost:{port}/postgres");
        // The postmaster reads its configuration when it comes to it: asked by connections, which say whether they are encrypted.
        let secured = Self { _cluster: cluster, dir, url };
        pgonce_testkit::eventually("the server speaks TLS", async || {
            matches!(secured.encrypted(&secured.settings("sslmode=prefer")).await, Ok(true))
        })
        .await;
        secured
    }

    fn settings(&self, parameters: &str) -> Settings {
        Settings::from_url(&format!("{}?{parameters}", self.url))
    }

    fn root(&self, file: &str) -> String {
        format!("sslrootcert={}", self.dir.path().join(file).display())
    }

    /// Whether the session is encrypted, asked in an intent's own transaction.
    async fn encrypted(&self, settings: &Settings) -> Result<bool, Error> {
        let once = Once::with_settings(settings.clone()).await?;
        let key = uuid::Uuid::new_v4().to_string();
        let asked = once.intent("s", &key).run(async |tx| {
            tx.execute("INSERT INTO public.effect VALUES ($1)", &[&key]).await?;
            let row = tx.query_one("SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()", &[]).await?;
            Ok(row.get::<_, bool>(0))
        });
        Ok(asked.await?.into_inner())
    }
}

fn authority() -> CertifiedIssuer<'static, KeyPair> {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
}

#[tokio::test]
async fn it_is_encrypted_and_checked_as_asked() {
    let server = Secured::new().await;
    let (right, wrong) = (server.root("ca.pem"), server.root("other.pem"));
    assert!(!server.encrypted(&server.settings("sslmode=disable")).await.unwrap());
    assert!(server.encrypted(&server.settings("sslmode=prefer")).await.unwrap(), "where the server can");
    for mode in ["require", "verify-ca", "verify-full"] {
        assert!(server.encrypted(&server.settings(&format!("sslmode={mode}&{right}"))).await.unwrap(), "{mode}");
        let refused = server.encrypted(&server.settings(&format!("sslmode={mode}&{wrong}"))).await;
        assert!(refused.is_err(), "{mode} takes a certificate of somebody else's authority");
        // The address is right, and the name is not what the certificate was given for.
        let elsewhere = server.url.replace("localhost", "127.0.0.1");
        let refused = server.encrypted(&Settings::from_url(&format!("{elsewhere}?sslmode={mode}&{right}"))).await;
        assert!(refused.is_err(), "{mode} takes a certificate for another name");
    }
    // The same as a key-value string.
    let port = server.url.rsplit(':').next().unwrap().split('/').next().unwrap();
    let user = server.url.split("//").nth(1).unwrap().split(['@', ':']).next().unwrap();
    let text = format!("host=localhost port={port} user={user} dbname=postgres sslmode=verify-full {right}");
    assert!(server.encrypted(&Settings::from_url(&text)).await.unwrap());
}

/// What travels as one request without TLS does with it: outcomes, refusals and lost sessions are told as they are.
#[tokio::test]
async fn intents_are_what_they_are_without() {
    let server = Secured::new().await;
    let mut settings = server.settings(&format!("sslmode=verify-full&{}", server.root("ca.pem")));
    settings.pool_max = 1;
    let once = Once::with_settings(settings).await.unwrap();
    let observer = pgonce::migrate::connect(&server.url).await.unwrap();
    observer.batch_execute("TRUNCATE public.effect").await.unwrap();
    let write = async |key: &str| {
        let written = once.intent("s", key).run(async |tx| {
            tx.execute("INSERT INTO public.effect VALUES ($1)", &[&key]).await?;
            Ok(tx.query_one("SELECT pg_backend_pid()", &[]).await?.get::<_, i32>(0))
        });
        written.await
    };
    let Outcome::Executed(pid) = write("first").await.unwrap() else { panic!("it was there") };
    assert_eq!(write("first").await.unwrap(), Outcome::Replayed(pid));
    // The outcome is refused, because the transaction is aborted; the session goes on.
    let aborted = once.intent("s", "aborted").run(async |tx| {
        tx.execute("INSERT INTO public.effect VALUES ('aborted')", &[]).await?;
        let _ = tx.batch_execute("SELECT 1 / 0").await;
        Ok(1)
    });
    assert!(matches!(aborted.await, Err(Error::Database(error)) if error.code().unwrap().code() == "25P02"));
    let failed = once.intent("s", "failed").run(async |_| Err::<i32, _>(Failure::refuse("no", "not today")));
    assert!(matches!(failed.await, Err(Error::Failed { code, .. }) if code == "no"));
    assert_eq!(write("second").await.unwrap(), Outcome::Executed(pid), "all of it on one connection");
    let joined = once.intent("s", "joined").run(async |tx| {
        let names = "SELECT string_agg(name, ', ' ORDER BY name) FROM pg_prepared_statements WHERE name LIKE 'pgonce%'";
        Ok(tx.query_one(names, &[]).await?.get::<_, String>(0))
    });
    assert_eq!(
        joined.await.unwrap(),
        Outcome::Executed("pgonce BEGIN, pgonce COMMIT".to_owned()),
        "as one request each"
    );
    // The session ends before the outcome.
    let ended = once.intent("s", "ended").run(async |tx| {
        tx.execute("INSERT INTO public.effect VALUES ('ended')", &[]).await?;
        if tx.query_one("SELECT pg_backend_pid()", &[]).await?.get::<_, i32>(0) == pid {
            observer.execute("SELECT pg_terminate_backend($1, 10000)", &[&pid]).await?;
        }
        Ok(2)
    });
    assert_eq!(ended.await.unwrap(), Outcome::Executed(2));
    let effects = "SELECT string_agg(key, ' ' ORDER BY key) FROM public.effect";
    let effects: String = observer.query_one(effects, &[]).await.unwrap().get(0);
    assert_eq!(effects, "ended first second", "each once");
}
