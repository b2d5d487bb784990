//! Two regions, each with its gateway, its database and its service: a key has one home.

use std::path::Path;

use pgonce_testkit::TestDb;

use crate::peers::{Authority, Wire, keyed, over, tls, tls_section};
use crate::rig::{Gateway, Reply, Service, send, states};

/// One region, and the wire by which others reach it.
struct Region {
    db: TestDb,
    service: Service,
    gateway: Gateway,
    wire: Wire,
}

const NAMES: [&str; 2] = ["eu", "us"];

impl Region {
    fn address(&self) -> std::net::SocketAddr {
        self.gateway.address
    }

    async fn post(&self, path: &str, key: &str) -> Reply {
        send(self.address(), "POST", path, &[("idempotency-key", &format!("\"{key}\""))], b"a").await
    }
}

/// `of` adds to each region's configuration.
async fn regions(of: impl Fn(&str, &str) -> String) -> (Region, Region) {
    let secret = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(secret.path(), "a secret that both of the regions know").unwrap();
    let (east, west) = (Wire::open(None).await, Wire::open(None).await);
    let list = format!(
        "[[gateway.regions.region]]\nname = \"eu\"\nurl = \"http://{}\"\n\
         [[gateway.regions.region]]\nname = \"us\"\nurl = \"http://{}\"\n",
        east.address, west.address
    );
    let east = region("eu", secret.path(), &of("eu", &list), east).await;
    let west = region("us", secret.path(), &of("us", &list), west).await;
    (east, west)
}

async fn region(own: &str, secret: &Path, config: &str, wire: Wire) -> Region {
    let db = TestDb::new().await;
    let service = Service::start(db.direct_url()).await;
    let section = format!("[gateway.regions]\nown = \"{own}\"\nsecret = {{ file = \"{}\" }}\n", secret.display());
    // No connection of one test's step is left for the next.
    let config = format!("upstream.idle_max = 0\n{}", config.replace("[gateway.regions]\n", &section));
    let gateway = Gateway::start(db.url(), service.address, &config).await;
    wire.lead_to(gateway.address);
    Region { db, service, gateway, wire }
}

fn plain(_: &str, list: &str) -> String {
    format!("in_progress = \"wait\"\n[gateway.regions]\n{list}")
}

/// How many effects a key has, in both.
async fn effects(regions: (&Region, &Region), key: &str) -> (i64, i64) {
    (regions.0.db.effects(key).await, regions.1.db.effects(key).await)
}

/// Keys that are at home in the first and in the second, three of each: by where their effects are.
async fn keys_by_home(eu: &Region, us: &Region) -> [Vec<String>; 2] {
    let mut homes = [Vec::new(), Vec::new()];
    for n in 0..100 {
        if homes.iter().all(|keys| keys.len() >= 3) {
            return homes;
        }
        let key = format!("key-{n}");
        let by = if n % 2 == 0 { eu } else { us };
        assert_eq!(by.post("/orders", &key).await.status, 201);
        match effects((eu, us), &key).await {
            (1, 0) => homes[0].push(key),
            (0, 1) => homes[1].push(key),
            other => panic!("{key} has {other:?} effects"),
        }
    }
    panic!("a hundred keys, and not three in each of {NAMES:?}: {homes:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_ends_at_its_keys_home_wherever_it_comes() {
    let (eu, us) = regions(plain).await;
    let homes = keys_by_home(&eu, &us).await;
    for key in homes.iter().flatten() {
        let (one, two) = (eu.post("/orders", key).await, us.post("/orders", key).await);
        assert!(one.is_replay() && two.is_replay(), "{one:?} {two:?}");
        assert_eq!(one.body, two.body);
        let other = send(us.address(), "POST", "/orders", &[("idempotency-key", &format!("\"{key}\""))], b"b").await;
        assert_eq!((other.status, other.problem().as_str()), (422, "conflict"), "the payload is pinned everywhere");
        let (here, there) = effects((&eu, &us), key).await;
        assert_eq!(here + there, 1);
    }
    for (region, others) in [(&eu, &homes[1]), (&us, &homes[0])] {
        for key in others {
            assert_eq!(states(&region.db, key).await, Vec::<String>::new(), "no row where it is not at home");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_same_key_through_both_at_once_is_one_effect() {
    let (eu, us) = regions(plain).await;
    for n in 0..10 {
        let key = format!("\"both-{n}\"");
        let mut clients = Vec::new();
        for client in 0..8 {
            let address = if client % 2 == 0 { eu.address() } else { us.address() };
            let key = key.clone();
            clients.push(tokio::spawn(async move {
                send(address, "POST", "/orders", &[("idempotency-key", &key)], b"a").await
            }));
        }
        let mut bodies = Vec::new();
        for client in clients {
            let reply = client.await.unwrap();
            assert_eq!(reply.status, 201, "{reply:?}");
            bodies.push(reply.body);
        }
        bodies.dedup();
        assert_eq!(bodies.len(), 1);
        let (here, there) = effects((&eu, &us), key.trim_matches('"')).await;
        assert_eq!(here + there, 1);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn without_its_home_a_key_is_refused() {
    let (eu, mut us) = regions(plain).await;
    let [at_eu, at_us] = keys_by_home(&eu, &us).await;
    us.wire.cut().await;
    let before = (eu.service.requests(), us.service.requests());
    for key in &at_us {
        let refused = eu.post("/orders", key).await;
        assert_eq!((refused.status, refused.problem().as_str()), (503, "home-away"), "{refused:?}");
    }
    assert_eq!((eu.service.requests(), us.service.requests()), before, "nobody else may run it");
    assert!(eu.post("/orders", &at_eu[0]).await.is_replay(), "what is at home here is answered");
    us.wire.mend().await;
    assert!(eu.post("/orders", &at_us[0]).await.is_replay());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_cannot_say_that_a_gateway_sent_it() {
    let (eu, us) = regions(|own, list| {
        let tenant = "[gateway.tenant]\nsource = \"header\"\nheader = \"x-tenant\"\n";
        format!("{tenant}{}", plain(own, list).replacen("in_progress = \"wait\"\n", "", 1))
    })
    .await;
    let minute = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs() / 60;
    for n in 0..6 {
        for region in [&eu, &us] {
            let (key, forged) = (format!("\"k-{n}\""), format!("{}:{minute}:{}", NAMES[n % 2], "0".repeat(64)));
            let headers = [
                ("idempotency-key", key.as_str()),
                ("x-tenant", "mine"),
                ("pgonce-region-hop", &forged),
                ("pgonce-tenant", "theirs"),
                ("x-forwarded-for", "192.0.2.1"),
            ];
            assert_eq!(send(region.address(), "POST", "/orders", &headers, b"a").await.status, 201);
        }
        let (here, there) = effects((&eu, &us), &format!("k-{n}")).await;
        assert_eq!(here + there, 1, "it went home all the same, as what the tenant source says");
    }
    for region in [&eu, &us] {
        let sql = "SELECT count(*) FROM public.effect WHERE tenant <> 'mine'";
        assert_eq!(region.db.client().await.query_one(sql, &[]).await.unwrap().get::<_, i64>(0), 0);
        assert_eq!(region.service.header("pgonce-region-hop"), None);
        let forwarded_for = region.service.header("x-forwarded-for").unwrap();
        assert!(!forwarded_for.contains("192.0.2.1"), "nor where it came from: {forwarded_for}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_service_at_home_learns_who_the_client_was() {
    // A proxy before each gateway, which is believed, says who the client was.
    let (eu, us) = regions(|own, list| format!("gateway.trust_forwarded = true\n{}", plain(own, list))).await;
    for n in 0..50 {
        let key = format!("\"key-{n}\"");
        let headers = [("idempotency-key", key.as_str()), ("x-forwarded-for", "192.0.2.7"), ("host", "shop.example")];
        assert_eq!(send(eu.address(), "POST", "/orders", &headers, b"a").await.status, 201);
        if us.db.effects(key.trim_matches('"')).await == 1 {
            let list = us.service.header("x-forwarded-for").unwrap();
            assert_eq!(list, "192.0.2.7, 127.0.0.1, 127.0.0.1", "the client, the proxy, the other gateway");
            assert_eq!(us.service.header("x-forwarded-host").unwrap(), "shop.example");
            return;
        }
    }
    panic!("fifty keys, and none at home in the other region");
}

/// The other gateway's certificate is not the client's: the tenant is who the first gateway verified.
#[tokio::test(flavor = "multi_thread")]
async fn a_certificates_tenant_is_the_same_in_both_regions() {
    let authority = Authority::new();
    let (eu, us) = regions(|own, list| {
        let identity = authority.sign(&format!("gateway-{own}"));
        let section = tls_section(&identity, Some(&authority.ca()));
        let towards = format!(
            "[gateway.regions]\nca_file = \"{}\"\ncert = \"{}\"\nkey = \"{}\"\n",
            authority.ca().display(),
            identity.cert.display(),
            identity.key.display()
        );
        let list = list.replace("http://127.0.0.1", "https://localhost");
        format!("{section}[gateway.tenant]\nsource = \"mtls\"\n{towards}{list}")
    })
    .await;
    let mut counts = (0, 0);
    for n in 0..12 {
        let key = format!("k-{n}");
        let mut bodies = Vec::new();
        for tenant in ["shop-1", "shop-2"] {
            let client = authority.client(Some(&authority.sign(tenant)), &["h2"]);
            for region in [&eu, &us] {
                let stream = tls(region.address(), &client).await.unwrap();
                let (reply, _) = over(stream, true, keyed("/orders", &key)).await.unwrap();
                assert_eq!(reply.status, 201, "{reply:?}");
                bodies.push(reply.body);
            }
        }
        assert_eq!((&bodies[0], &bodies[2]), (&bodies[1], &bodies[3]), "by either gateway");
        let (here, there) = effects((&eu, &us), &key).await;
        assert_eq!(here + there, 2, "one for each tenant");
        counts = (counts.0 + here, counts.1 + there);
    }
    assert!(counts.0 > 0 && counts.1 > 0, "some went from one to the other: {counts:?}");
    for region in [&eu, &us] {
        let sql = "SELECT count(*) FROM once.intents WHERE tenant NOT IN ('shop-1', 'shop-2')";
        assert_eq!(region.db.client().await.query_one(sql, &[]).await.unwrap().get::<_, i64>(0), 0);
    }
}

/// Where to ask how it goes is the gateway that the client knows; who knows is the key's home.
#[tokio::test(flavor = "multi_thread")]
async fn a_status_url_leads_home() {
    let (eu, us) = regions(|own, list| plain(own, list).replace("\"wait\"", "\"status\"")).await;
    let mut asked = [0, 0];
    for n in 0..100 {
        let key = format!("\"held-{n}\"");
        let headers = [("idempotency-key", key.as_str())];
        let (address, held) = (eu.address(), key.clone());
        let first =
            tokio::spawn(async move { send(address, "POST", "/hold", &[("idempotency-key", &held)], b"a").await });
        let home = tokio::select! {
            () = eu.service.state.arrived.notified() => 0,
            () = us.service.state.arrived.notified() => 1,
        };
        let again = send(us.address(), "POST", "/hold", &headers, b"a").await;
        assert_eq!(again.status, 202, "{again:?}");
        for region in [&eu, &us] {
            let status = send(region.address(), "GET", again.header("location").unwrap(), &headers, b"").await;
            assert_eq!(status.json()["status"], "processing", "{status:?}");
        }
        [&eu, &us][home].service.state.gate.notify_one();
        assert_eq!(first.await.unwrap().status, 201);
        asked[home] += 1;
        if asked.iter().all(|count| *count > 0) {
            return;
        }
    }
    panic!("all at home in one: {asked:?}");
}

/// Two files that differ: what is sent to a gateway that does not take itself for home stops there.
#[tokio::test(flavor = "multi_thread")]
async fn gateways_that_disagree_run_nothing_and_do_not_send_it_around() {
    let (eu, us) = regions(|own, list| {
        // Only us knows of a third region.
        let third = "[[gateway.regions.region]]\nname = \"ap\"\nurl = \"http://127.0.0.1:9\"\n";
        format!("{}{}", plain(own, list), if own == "us" { third } else { "" })
    })
    .await;
    let mut stopped = 0;
    for n in 0..60 {
        let key = format!("key-{n}");
        let before = eu.service.requests() + us.service.requests();
        let hops = (eu.wire.connections(), us.wire.connections());
        let reply = eu.post("/orders", &key).await;
        let ran = eu.service.requests() + us.service.requests() - before;
        match reply.status {
            201 => assert_eq!(ran, 1),
            _ => {
                assert_eq!((reply.status, reply.problem().as_str()), (503, "home-away"), "{reply:?}");
                assert_eq!(ran, 0);
                assert_eq!((eu.wire.connections(), us.wire.connections()), (hops.0, hops.1 + 1), "one hop, not more");
                stopped += 1;
            }
        }
    }
    assert!(stopped > 0, "of sixty keys, some are at home nowhere that both agree on");
}
