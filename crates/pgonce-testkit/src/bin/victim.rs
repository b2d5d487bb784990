//! A client process that is killed, or stopped, at a named point of one intent.
//!
//! `pgonce-victim URL atomic|leased SCOPE KEY [FAILPOINT abort|stop]`: prints what it was told, one line.

#![allow(clippy::print_stdout, clippy::unwrap_used, clippy::expect_used, reason = "a test's own program")]

use std::time::Duration;

use pgonce::{Error, Once, Outcome, Settings};
use serde_json::json;

#[tokio::main]
async fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [url, mode, scope, key, rest @ ..] = arguments.as_slice() else {
        panic!("URL atomic|leased SCOPE KEY [FAILPOINT abort|stop]")
    };
    if let [failpoint, action] = rest {
        let action = action.clone();
        fail::cfg_callback(failpoint.clone(), move || hit(&action)).unwrap();
    }
    let mut settings = Settings::from_url(url);
    settings.claimed_by = Some(format!("victim {}", std::process::id()));
    settings.retry.deadline = Duration::from_secs(10);
    let once = Once::with_settings(settings).await.unwrap();
    let payload = json!({ "key": key });
    let outcome = if mode == "atomic" {
        once.intent(scope, key)
            .payload(&payload)
            .run(async |tx| {
                let claim = tx.claim_id();
                tx.execute(
                    "INSERT INTO public.effect (scope, key, claim_id) VALUES ($1, $2, $3)",
                    &[scope, key, &claim],
                )
                .await?;
                Ok(payload.clone())
            })
            .await
    } else {
        // Leased work whose effect shares the transaction with its fenced completion would be atomic; here
        // the effect is elsewhere, as with a provider: policy decides what a death in between means.
        let effects = pgonce::migrate::connect(url).await.unwrap();
        once.intent(scope, key)
            .payload(&payload)
            .run_leased(async |lease| {
                effects
                    .execute(
                        "INSERT INTO public.effect (scope, key, claim_id) VALUES ($1, $2, $3)",
                        &[scope, key, &lease.claim_id],
                    )
                    .await?;
                Ok(payload.clone())
            })
            .await
    };
    match outcome {
        Ok(Outcome::Executed(body)) => println!("executed {body}"),
        Ok(Outcome::Replayed(body)) => println!("replayed {body}"),
        Err(error @ (Error::InDoubt { .. } | Error::InProgress { .. } | Error::Uncertain)) => {
            println!("unknown {error}")
        }
        Err(error) => println!("failed {error}"),
    }
}

/// The end, or a pause from outside: a process that stops without a word.
fn hit(action: &str) {
    let signal = if action == "stop" { "-STOP" } else { "-KILL" };
    let own = std::process::id().to_string();
    std::process::Command::new("kill").args([signal, &own]).status().unwrap();
    if action != "stop" {
        // The signal is on its way; nothing may happen after this point.
        loop {
            std::thread::park();
        }
    }
}
