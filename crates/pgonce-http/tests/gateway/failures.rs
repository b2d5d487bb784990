//! The service answers 5xx, resets, is away or hangs: the scope's policy decides, and nobody guesses.

use crate::rig::Rig;

#[tokio::test(flavor = "multi_thread")]
async fn rerun_runs_again_and_passes_the_answer_on() {
    let rig = Rig::new("stale = \"rerun\"").await;
    let first = rig.post("/status/503", "k", "a").await;
    assert_eq!((first.status, first.json()["status"].as_u64()), (503, Some(503)), "the service's own words");
    assert_eq!(rig.states("k").await, ["failed_retryable"]);
    assert_eq!(rig.post("/status/503", "k", "a").await.json()["number"], 2);
    for attempt in 1..=2 {
        let lost = rig.post("/reset", "r", "a").await;
        assert_eq!((lost.status, lost.problem().as_str()), (502, "upstream-failed"), "nothing is held");
        assert_eq!((lost.json()["effect"].as_str(), lost.json()["retryable"].as_bool()), (Some("unknown"), Some(true)));
        assert_eq!(rig.states("r").await, ["failed_retryable"]);
        assert_eq!(rig.effects("r").await, attempt, "run again, as it was told");
    }
}

/// The attempts are used up, and the last ended in doubt: nobody may say that nothing was done.
#[tokio::test(flavor = "multi_thread")]
async fn what_was_given_up_may_have_been_done() {
    let rig = Rig::new("stale = \"rerun\"\nattempts_max = 1").await;
    let lost = rig.post("/reset", "k", "a").await;
    assert_eq!((lost.status, lost.json()["effect"].as_str()), (502, Some("unknown")), "{lost:?}");
    assert_eq!((rig.states("k").await, rig.effects("k").await), (vec!["failed_final".to_owned()], 1));
    let again = rig.post("/reset", "k", "a").await;
    assert_eq!((again.status, again.problem().as_str()), (409, "failed-before"));
    let told = again.json();
    assert_eq!((told["effect"].as_str(), told["retryable"].as_bool()), (Some("unknown"), Some(false)), "{told}");
    assert_eq!(told["failure_code"], "abandoned");
    assert_eq!(rig.effects("k").await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn hold_holds_and_says_so() {
    let rig = Rig::new("stale = \"hold\"").await;
    for (path, key) in [("/status/500", "k"), ("/reset", "r")] {
        let first = rig.post(path, key, "a").await;
        assert_eq!((first.status, first.problem().as_str()), (502, "upstream-uncertain"));
        assert_eq!(first.json()["effect"], "unknown");
        assert_eq!(rig.states(key).await, ["uncertain"]);
        let requests = rig.service.requests();
        let again = rig.post(path, key, "a").await;
        assert_eq!((again.status, again.problem().as_str()), (409, "uncertain"));
        assert_eq!(rig.service.requests(), requests, "nothing was sent");
    }
    let sql = "SELECT once.settle(p_scope => scope, p_key => key, p_verdict => 'retry', p_actor => 'me',
                   p_reason => 'looked', p_tenant => tenant) FROM once.intents WHERE key = 'k'";
    rig.db.client().await.execute(sql, &[]).await.unwrap();
    assert_eq!(rig.post("/status/500", "k", "a").await.status, 502, "settled as not done, it runs again");
    assert_eq!(rig.effects("r").await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_service_that_is_away_has_done_nothing() {
    let rig = Rig::new("stale = \"hold\"").await;
    let dead = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let gateway = crate::rig::Gateway::start(rig.db.url(), dead, "stale = \"hold\"").await;
    let key = [("idempotency-key", "\"k\"")];
    let away = crate::rig::send(gateway.address, "POST", "/orders", &key, b"a").await;
    assert_eq!((away.status, away.problem().as_str()), (502, "upstream-away"));
    assert_eq!(away.json()["effect"], "not_done");
    assert_eq!(rig.states("k").await, Vec::<String>::new(), "the claim was given back");
    assert_eq!(rig.post("/orders", "k", "a").await.status, 201, "by way of the other gateway");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_time_out_is_uncertain() {
    let rig = Rig::new("stale = \"hold\"\nupstream.timeout = \"200ms\"").await;
    let late = rig.post("/hold", "k", "a").await;
    assert_eq!((late.status, late.problem().as_str()), (504, "upstream-timeout"));
    assert_eq!(rig.states("k").await, ["uncertain"]);
}

/// `Pgonce-Claim`: the service commits the outcome with its effect, and the gateway serves what was committed.
#[tokio::test(flavor = "multi_thread")]
async fn what_the_service_committed_is_what_is_served() {
    let rig = Rig::new("stale = \"hold\"").await;
    let address = rig.gateway.address;
    let key = [("idempotency-key", "\"k\"")];
    let first = tokio::spawn(async move { crate::rig::send(address, "POST", "/hold", &key, b"a").await });
    rig.service.state.arrived.notified().await;
    let sql = "SELECT once.succeed(p_scope => scope, p_key => key, p_claim_id => claim_id, p_response_code => 202,
                   p_response => '{\"committed\": true}', p_tenant => tenant) FROM once.intents WHERE key = 'k'";
    rig.db.client().await.execute(sql, &[]).await.unwrap();
    rig.service.state.gate.notify_one();
    let first = first.await.unwrap();
    assert_eq!((first.status, first.json()["committed"].as_bool(), first.is_replay()), (202, Some(true), false));
    let again = rig.post("/hold", "k", "a").await;
    assert_eq!((again.status, &again.body, again.is_replay()), (202, &first.body, true));
}

/// The same where the service then dies without an answer: nothing is uncertain.
#[tokio::test(flavor = "multi_thread")]
async fn a_committed_outcome_survives_a_lost_answer() {
    let rig = Rig::new("stale = \"hold\"\nupstream.timeout = \"1s\"").await;
    let address = rig.gateway.address;
    let key = [("idempotency-key", "\"k\"")];
    let first = tokio::spawn(async move { crate::rig::send(address, "POST", "/hold", &key, b"a").await });
    rig.service.state.arrived.notified().await;
    let sql = "SELECT once.succeed(p_scope => scope, p_key => key, p_claim_id => claim_id, p_response_code => 201,
                   p_response_body => 'done', p_tenant => tenant) FROM once.intents WHERE key = 'k'";
    rig.db.client().await.execute(sql, &[]).await.unwrap();
    let first = first.await.unwrap(); // the service never answers
    assert_eq!((first.status, first.body.as_ref()), (201, &b"done"[..]), "{first:?}");
    assert_eq!(rig.states("k").await, ["succeeded"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_probe_by_get_decides() {
    let config = "stale = \"probe\"\nprobe = \"/status/{key}\"";
    let rig = Rig::new(config).await;
    // The key is the status that the probe's URL answers: the service does not know it.
    let gone = rig.post("/reset", "404", "a").await;
    assert_eq!((gone.status, gone.problem().as_str()), (502, "upstream-failed"));
    assert_eq!(rig.states("404").await, ["failed_retryable"], "not done: it may run");
    let known = rig.post("/reset", "200", "a").await;
    assert_eq!((known.status, known.json()["status"].as_u64()), (200, Some(200)), "{known:?}");
    assert_eq!(rig.states("200").await, ["succeeded"]);
    let unclear = rig.post("/reset", "500", "a").await;
    assert_eq!((unclear.status, unclear.problem().as_str()), (502, "upstream-uncertain"));
    assert_eq!(rig.states("500").await, ["uncertain"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn without_the_database_guarded_requests_fail_closed_and_others_pass() {
    let cluster = tokio::task::spawn_blocking(pgonce_testkit::cluster).await.unwrap();
    let url = cluster.url("postgres");
    let mut admin = pgonce::migrate::connect(&url).await.unwrap();
    pgonce::migrate::apply(&mut admin, false).await.unwrap();
    let service = crate::rig::Service::start(&url).await;
    let gateway = crate::rig::Gateway::start(&url, service.address, "").await;
    let key = [("idempotency-key", "\"k\"")];
    assert_eq!(crate::rig::send(gateway.address, "GET", "/_pgonce/ready", &[], b"").await.status, 200);
    let mut cluster = cluster;
    let cluster = tokio::task::spawn_blocking(move || {
        cluster.kill_9().unwrap();
        cluster
    })
    .await
    .unwrap();
    let refused = crate::rig::send(gateway.address, "POST", "/else", &key, b"a").await;
    assert_eq!((refused.status, refused.problem().as_str()), (503, "database-away"));
    assert_eq!(refused.json()["effect"], "not_done");
    assert_eq!(service.requests(), 0);
    assert_eq!(crate::rig::send(gateway.address, "GET", "/else", &[], b"").await.status, 200);
    assert_eq!(crate::rig::send(gateway.address, "POST", "/else", &[], b"a").await.status, 200, "no key, no guard");
    assert_eq!(crate::rig::send(gateway.address, "GET", "/_pgonce/ready", &[], b"").await.status, 503);
    assert_eq!(crate::rig::send(gateway.address, "GET", "/_pgonce/health", &[], b"").await.status, 200);
    drop(cluster);
}
