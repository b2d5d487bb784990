//! A worker process that is killed, or stopped, while it works.
//!
//! `pgonce-test-worker URL QUEUE NAME LEASE_MS GROUP`: each job adds a row to `public.did`. A payload with `kill` kills the
//! process; one with `lock` waits for that advisory lock first.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test's own program")]

use std::time::Duration;

use pgonce::{Once, Settings, Worker};

#[tokio::main]
async fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [url, queue, name, lease, group] = arguments.as_slice() else { panic!("URL QUEUE NAME LEASE_MS GROUP") };
    let mut settings = Settings::from_url(url);
    settings.pool_max = 6;
    let once = Once::with_settings(settings).await.unwrap();
    Worker::new(once.queue(queue))
        .name(name)
        .at_once(2)
        .lease(Duration::from_millis(lease.parse().unwrap()))
        .group(group.parse().unwrap())
        .run(async |tx, job| {
            if job.payload["kill"] == true {
                let own = std::process::id().to_string();
                std::process::Command::new("kill").args(["-KILL", &own]).status().unwrap();
                std::future::pending::<()>().await;
            }
            if let Some(lock) = job.payload["lock"].as_i64() {
                // For as long as the test holds it: the connection's own limits are shorter.
                tx.batch_execute("SET LOCAL lock_timeout = 0; SET LOCAL statement_timeout = 0").await?;
                tx.execute("SELECT pg_advisory_xact_lock($1)", &[&lock]).await?;
            }
            let sql = "INSERT INTO public.did (key, job, attempt) VALUES ($1, $2, $3)";
            tx.execute(sql, &[&job.key, &job.id, &i32::try_from(job.attempt).unwrap()]).await?;
            Ok(())
        })
        .await
        .unwrap();
}
