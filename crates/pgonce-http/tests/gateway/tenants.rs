//! Two tenants with the same key never meet.

use crate::rig::Rig;

#[tokio::test(flavor = "multi_thread")]
async fn the_same_key_of_two_tenants_is_two_intents() {
    let rig = Rig::new("[gateway.tenant]\nsource = \"header\"\nheader = \"x-tenant\"").await;
    let of = |tenant: &'static str| [("idempotency-key", "\"k\""), ("x-tenant", tenant)];
    let a = rig.send("POST", "/orders", &of("a"), "1").await;
    let b = rig.send("POST", "/orders", &of("b"), "1").await;
    assert_eq!((a.status, b.status), (201, 201));
    assert!(!b.is_replay());
    assert_ne!(a.body, b.body);
    // The shape of the answer does not tell whether another tenant has used a key, whatever the payload.
    let c = rig.send("POST", "/orders", &of("c"), "another payload").await;
    assert_eq!((c.status, c.is_replay()), (201, false));
    assert_eq!(rig.send("POST", "/orders", &of("a"), "1").await.body, a.body);
    assert_eq!(rig.send("POST", "/orders", &of("b"), "1").await.body, b.body);
    assert_eq!(rig.effects("k").await, 3);
    let names = |reply: &crate::rig::Reply| {
        let mut names: Vec<String> = reply.headers.iter().map(|(name, _)| name.clone()).collect();
        names.sort();
        names
    };
    assert_eq!(names(&a), names(&b));
    assert_eq!(names(&a), names(&c));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_without_its_tenant_is_refused() {
    let rig = Rig::new("[gateway.tenant]\nsource = \"header\"\nheader = \"x-tenant\"").await;
    let refused = rig.post("/orders", "k", "a").await;
    assert_eq!((refused.status, refused.problem().as_str()), (401, "tenant-missing"));
    assert_eq!(rig.service.requests(), 0);
    assert_eq!(rig.states("k").await, Vec::<String>::new());
}

/// One tenant's running request does not make another wait.
#[tokio::test(flavor = "multi_thread")]
async fn another_tenants_running_request_is_not_seen() {
    let rig = Rig::new("[gateway.tenant]\nsource = \"header\"\nheader = \"x-tenant\"").await;
    let address = rig.gateway.address;
    let first = tokio::spawn(async move {
        crate::rig::send(address, "POST", "/hold", &[("idempotency-key", "\"k\""), ("x-tenant", "a")], b"1").await
    });
    rig.service.state.arrived.notified().await;
    let b = rig.send("POST", "/orders", &[("idempotency-key", "\"k\""), ("x-tenant", "b")], "1").await;
    assert_eq!(b.status, 201);
    rig.service.state.gate.notify_one();
    assert_eq!(first.await.unwrap().status, 201);
}
