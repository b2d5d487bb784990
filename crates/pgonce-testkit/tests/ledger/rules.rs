//! One posting at a time: what is taken, what is refused, and that a refusal leaves nothing.

use pgonce::ledger::{Account, PostedKind, Posting, open_account};
use pgonce_testkit::TestDb;
use tokio_postgres::Client;

use crate::book::{balance, book, code, is_sound, number, post, text, transfer};

async fn postings(client: &Client) -> i64 {
    number(client, "SELECT count(*) FROM once_ledger.posting").await
}

#[tokio::test]
async fn an_operation_is_posted_once_in_whatever_order_its_entries_come() {
    let db = book().await;
    let client = db.client().await;
    let posted = post(&client, "o", &["a0", "a1"], &[500, -500], &["EUR"]).await.unwrap();
    assert_eq!(posted, ("posted".into(), vec![500, -500]));
    transfer(&client, "later", "a0", "a1", 7).await.unwrap();
    // The shortest way, the long way, and the one with a currency for each: all the same group.
    for (accounts, amounts, currencies) in [
        (["a0", "a1"], [500, -500], vec!["EUR"]),
        (["a1", "a0"], [-500, 500], vec!["EUR"]),
        (["a0", "a1"], [500, -500], vec!["EUR", "EUR"]),
    ] {
        let again = post(&client, "o", &accounts, &amounts, &currencies).await.unwrap();
        assert_eq!(again, ("already".into(), vec![500, -500]), "the balances are those after it, not those of now");
    }
    for (accounts, amounts) in [(["a0", "a1"], [501, -501]), (["a0", "a2"], [500, -500]), (["a0", "a1"], [-500, 500])] {
        assert_eq!(post(&client, "o", &accounts, &amounts, &["EUR"]).await.unwrap_err(), "P4094");
    }
    assert_eq!((postings(&client).await, balance(&client, "a0").await), (2, 493));
    // Another tenant, another source: other operations, and a tenant's accounts are its own.
    let sql = "SELECT kind FROM once_ledger.post('other', 'o', '{a0,a1}', '{1,-1}', '{EUR}')";
    assert_eq!(text(&client, sql).await.unwrap(), "posted");
    let sql = "SELECT kind FROM once_ledger.post('test', 'o', '{a0,a1}', '{1,-1}', '{EUR}', p_tenant => 't')";
    assert_eq!(text(&client, sql).await.unwrap_err(), "P4092");
    is_sound(&client).await;
}

#[tokio::test]
async fn what_does_not_balance_or_is_malformed_is_refused_and_leaves_nothing() {
    const MAX: i64 = i64::MAX;
    let db = book().await;
    let client = db.client().await;
    client
        .batch_execute("SELECT once_ledger.open_account('usd', 'USD'), once_ledger.open_account('usd2', 'USD')")
        .await
        .unwrap();
    for (accounts, amounts, currencies, expected) in [
        (vec!["a0", "a1"], vec![500, -499], vec!["EUR"], "P4091"),
        (vec!["a0", "a1", "a2"], vec![1, 1, -1], vec!["EUR"], "P4091"),
        (vec!["a0", "usd"], vec![1, -1], vec!["EUR", "USD"], "P4091"),
        (vec!["a0", "a1"], vec![MAX, MAX], vec!["EUR"], "P4091"),
        (vec!["a0", "a1"], vec![0, 0], vec!["EUR"], "P4090"),
        (vec!["a0", "a1"], vec![i64::MIN, MAX], vec!["EUR"], "P4090"),
        (vec!["a0"], vec![0], vec!["EUR"], "P4090"),
        (vec![], vec![], vec!["EUR"], "P4090"),
        (vec!["a0", "a1"], vec![1], vec!["EUR"], "P4090"),
        (vec!["a0", "a1"], vec![1, -1], vec![], "P4090"),
        (vec!["a0", "a1", "a2"], vec![1, 1, -2], vec!["EUR", "EUR"], "P4090"),
        (vec!["a0", "nobody"], vec![1, -1], vec!["EUR"], "P4092"),
        (vec!["a0", "usd"], vec![1, -1], vec!["EUR"], "P4092"),
        (vec!["a0", "a1", "usd"], vec![1, -2, 1], vec!["EUR"], "P4092"),
        (vec!["a0", "a1"], vec![1, -1], vec!["XXX"], "P4092"),
        // One account, two currencies: each balances, and one of them is not the account's.
        (vec!["a0", "a1", "a0", "usd"], vec![1, -1, 1, -1], vec!["EUR", "EUR", "USD", "USD"], "P4092"),
    ] {
        let refused = post(&client, "o", &accounts, &amounts, &currencies).await;
        assert_eq!(refused.unwrap_err(), expected, "{accounts:?} {amounts:?} {currencies:?}");
    }
    for call in [
        "NULL, 'o', '{a0,a1}', '{1,-1}', '{EUR}'",
        "'', 'o', '{a0,a1}', '{1,-1}', '{EUR}'",
        "'s', E'a\\nb', '{a0,a1}', '{1,-1}', '{EUR}'",
        "'s', repeat('o', 256), '{a0,a1}', '{1,-1}', '{EUR}'",
        "'s', 'o', '{a0,NULL}', '{1,-1}', '{EUR}'",
        "'s', 'o', '{a0,a1}', '{1,NULL}', '{EUR}'",
        "'s', 'o', '{a0,a1}', '{1,-1}', '{NULL}'",
        "'s', 'o', '{{a0,a1}}', '{1,-1}', '{EUR}'",
        "'s', 'o', '[2:3]={a0,a1}', '{1,-1}', '{EUR}'",
        "'s', 'o', NULL, '{1,-1}', '{EUR}'",
        "'s', 'o', '{a0,a1}', '{1,-1}', NULL",
        "'s', 'o', '{a0,a1}', '{1,-1}', '{EUR}', repeat('d', 1025)",
        "'s', 'o', '{a0,a1}', '{1,-1}', '{EUR}', p_tenant => NULL",
    ] {
        let sql = format!("SELECT kind FROM once_ledger.post({call})");
        assert_eq!(text(&client, &sql).await.unwrap_err(), "P4090", "{call}");
    }
    assert_eq!((postings(&client).await, balance(&client, "a0").await), (0, 0));
    // Two currencies in one group, each balanced.
    let exchange =
        post(&client, "fx", &["a0", "a1", "usd", "usd2"], &[5, -5, -6, 6], &["EUR", "EUR", "USD", "USD"]).await;
    assert_eq!(exchange.unwrap().1, [5, -5, -6, 6]);
    is_sound(&client).await;
}

#[tokio::test]
async fn balances_do_not_overflow() {
    let db = book().await;
    let client = db.client().await;
    transfer(&client, "all", "a1", "a0", i64::MAX).await.unwrap();
    assert_eq!(transfer(&client, "one more", "a2", "a0", 1).await.unwrap_err(), "22003");
    // More than a bigint on the way, and zero in the end.
    let amounts = [i64::MAX, i64::MAX, -i64::MAX, -i64::MAX];
    assert_eq!(post(&client, "big", &["a3", "a4", "a5", "a2"], &amounts, &["EUR"]).await.unwrap().0, "posted");
    assert_eq!(post(&client, "sum", &["a3", "a3", "a4", "a4"], &amounts, &["EUR"]).await.unwrap_err(), "22003");
    assert_eq!((balance(&client, "a0").await, balance(&client, "a2").await), (i64::MAX, -i64::MAX));
    is_sound(&client).await;
}

#[tokio::test]
async fn overdrafts_are_judged_by_what_a_group_comes_to() {
    let db = book().await;
    let client = db.client().await;
    let open = "SELECT once_ledger.open_account('purse', 'EUR', 0), once_ledger.open_account('credit', 'EUR', 100),
        once_ledger.open_account('wallet', 'EUR', 0, 'credit')";
    client.batch_execute(open).await.unwrap();
    assert_eq!(transfer(&client, "1", "purse", "a0", 1).await.unwrap_err(), "P4093");
    assert_eq!(transfer(&client, "2", "credit", "a0", 101).await.unwrap_err(), "P4093");
    assert_eq!(transfer(&client, "3", "credit", "a0", 100).await.unwrap(), "posted");
    assert_eq!(transfer(&client, "4", "credit", "a0", 1).await.unwrap_err(), "P4093");
    assert_eq!(transfer(&client, "5", "a0", "credit", 1).await.unwrap(), "posted", "to the better is always allowed");
    // A wallet is what the house owes: credits fill it, debits empty it.
    assert_eq!(transfer(&client, "6", "a0", "wallet", 1).await.unwrap_err(), "P4093");
    assert_eq!(transfer(&client, "7", "wallet", "a0", 40).await.unwrap(), "posted");
    assert_eq!(transfer(&client, "8", "a0", "wallet", 40).await.unwrap(), "posted");
    // Out 60, in 60 and out again: below zero on the way, not in the end. And the same that ends below.
    let accounts = ["purse", "purse", "a0"];
    assert_eq!(post(&client, "9", &accounts, &[-60, 60, 5], &["EUR"]).await.unwrap_err(), "P4091");
    assert_eq!(post(&client, "10", &accounts, &[-60, 65, -5], &["EUR"]).await.unwrap().0, "posted");
    assert_eq!(post(&client, "11", &accounts, &[-60, 54, 6], &["EUR"]).await.unwrap_err(), "P4093");
    client.batch_execute("SELECT once_ledger.set_overdraft('purse', 10)").await.unwrap();
    assert_eq!(post(&client, "11", &accounts, &[-60, 54, 6], &["EUR"]).await.unwrap().0, "posted");
    // A limit that is lowered below the balance lets it only come back.
    client.batch_execute("SELECT once_ledger.set_overdraft('purse', 0)").await.unwrap();
    assert_eq!(transfer(&client, "12", "purse", "a0", 1).await.unwrap_err(), "P4093");
    assert_eq!(transfer(&client, "13", "a0", "purse", 1).await.unwrap(), "posted");
    for sql in
        ["SELECT once_ledger.set_overdraft('purse', -1)::text", "SELECT once_ledger.open_account('x', 'EUR', -1)::text"]
    {
        assert_eq!(text(&client, sql).await.unwrap_err(), "P4090");
    }
    assert_eq!(text(&client, "SELECT once_ledger.set_overdraft('nobody', 1)::text").await.unwrap_err(), "P4092");
    is_sound(&client).await;
}

#[tokio::test]
async fn accounts_are_opened_once_and_on_the_fly_where_the_caller_says_so() {
    let db = book().await;
    let client = db.client().await;
    let open = |call: &str| format!("SELECT once_ledger.open_account({call})::text");
    let first = text(&client, &open("'x', 'EUR', 5")).await.unwrap();
    assert_eq!(text(&client, &open("'x', 'EUR'")).await.unwrap(), first);
    for (call, expected) in [
        ("'x', 'USD'", "P4092"),
        ("'x', 'EUR', p_side => 'credit'", "P4092"),
        ("'y', 'ZZZ'", "P4090"),
        ("'y', NULL", "P4090"),
        ("'', 'EUR'", "P4090"),
        ("repeat('y', 256), 'EUR'", "P4090"),
        ("'y', 'EUR', p_side => 'left'", "P4090"),
        ("'y', 'EUR', p_tenant => NULL", "P4090"),
    ] {
        assert_eq!(text(&client, &open(call)).await.unwrap_err(), expected, "{call}");
    }
    for entries in ["'{new1,new2}', '{1,-1}', '{EUR}'", "'{new5,new4,new3}', '{1,-2,1}', '{EUR}'"] {
        let sql = format!(
            "SELECT kind FROM once_ledger.post('s', md5({}), {entries}, p_open => true)",
            "'x' || clock_timestamp()"
        );
        assert_eq!(text(&client, &sql).await.unwrap(), "posted");
    }
    let refused =
        text(&client, "SELECT kind FROM once_ledger.post('s', 'o', '{n1,n2}', '{1,-1}', '{ZZZ}', p_open => true)")
            .await;
    assert_eq!(refused.unwrap_err(), "P4090", "an unknown currency opens nothing");
    for sql in [
        "SELECT once_ledger.define_currency('POINTS', 0)::text",
        "SELECT once_ledger.open_account('p', 'POINTS')::text",
        "SELECT once_ledger.define_currency('POINTS', 0)::text",
    ] {
        text(&client, sql).await.unwrap();
    }
    assert_eq!(text(&client, "SELECT once_ledger.define_currency('POINTS', 2)::text").await.unwrap_err(), "P4092");
    assert_eq!(text(&client, "SELECT once_ledger.define_currency('lower', 2)::text").await.unwrap_err(), "P4090");
    let shown = "SELECT concat_ws(' ', once_ledger.format_amount(-123456, 'EUR'), once_ledger.format_amount(5, 'JPY'),
        once_ledger.format_amount(5, 'KWD'), once_ledger.format_amount(9223372036854775807, 'USD'))";
    assert_eq!(text(&client, shown).await.unwrap(), "-1234.56 5 0.005 92233720368547758.07");
    is_sound(&client).await;
}

#[tokio::test]
async fn a_posting_is_taken_back_once() {
    let db = book().await;
    let client = db.client().await;
    post(&client, "o", &["a0", "a1", "a0"], &[500, -400, -100], &["EUR"]).await.unwrap();
    let reverse = |by: &str, of: &str| format!("SELECT kind FROM once_ledger.reverse('undo', '{by}', 'test', '{of}')");
    assert_eq!(text(&client, &reverse("1", "nothing")).await.unwrap_err(), "P4095");
    assert_eq!(text(&client, &reverse("1", "o")).await.unwrap(), "posted");
    assert_eq!(text(&client, &reverse("1", "o")).await.unwrap(), "already");
    assert_eq!(text(&client, &reverse("2", "o")).await.unwrap_err(), "P4095");
    assert_eq!((balance(&client, "a0").await, balance(&client, "a1").await), (0, 0));
    // An operation that says the same, but does not take anything back, is another one.
    let plain = "SELECT kind FROM once_ledger.post('undo', '1', '{a0,a1,a0}', '{-500,400,100}', '{EUR}')";
    assert_eq!(text(&client, plain).await.unwrap_err(), "P4094");
    transfer(&client, "p", "a0", "a1", 5).await.unwrap();
    assert_eq!(text(&client, &reverse("1", "p")).await.unwrap_err(), "P4094");
    let shown = "SELECT reversed_by_operation FROM once_ledger.postings WHERE operation = 'o'";
    assert_eq!(text(&client, shown).await.unwrap(), "1");
    is_sound(&client).await;
}

async fn opened(db: &TestDb, name: &'static str, overdraft: Option<i64>, credit: bool) {
    let account = Account { name, currency: "EUR", overdraft, credit };
    open_account(&db.client().await, "shop", account).await.unwrap();
}

/// In the transaction of an intent: a replay posts nothing, a refusal rolls back everything.
#[tokio::test]
async fn postings_commit_with_the_effect() {
    let db = book().await;
    let once = db.once().await;
    opened(&db, "cash", None, false).await;
    opened(&db, "wallet", Some(0), true).await;
    let run = async |key: &str, posting: Posting| {
        let intent = once.intent("pay", key).tenant("shop").payload(&key);
        intent
            .run(async |tx| {
                let key = tx.stable_uuid("effect").to_string();
                let sql = "INSERT INTO public.effect (scope, key, claim_id) VALUES ('pay', $1, gen_random_uuid())";
                tx.execute(sql, &[&key]).await?;
                let posted = tx.post(&posting).await?;
                Ok((posted.id, posted.kind == PostedKind::Posted, posted.balances))
            })
            .await
    };
    let fill = Posting::new("shop", "fill").debit("cash", 40, "EUR").credit("wallet", 40, "EUR").description("a card");
    let (_, is_new, balances) = run("fill", fill.clone()).await.unwrap().into_inner();
    assert!(is_new);
    assert_eq!(balances, [("cash".to_owned(), 40), ("wallet".to_owned(), -40)]);
    assert!(run("fill", fill.clone()).await.unwrap().is_replay());
    // Another intent, the same operation: the effect is its own, the posting is the first one's.
    let (_, is_new, _) = run("fill again", fill).await.unwrap().into_inner();
    assert!(!is_new);
    let spend = Posting::new("shop", "spend").debit("wallet", 41, "EUR").credit("cash", 41, "EUR");
    match run("spend", spend).await {
        Err(pgonce::Error::Failed { code, .. }) => assert_eq!(code, "P4093"),
        other => panic!("{other:?}"),
    }
    let client = db.client().await;
    assert_eq!(number(&client, "SELECT count(*) FROM public.effect").await, 2);
    assert_eq!(number(&client, "SELECT count(*) FROM once_ledger.postings WHERE tenant = 'shop'").await, 1);
    // By the caller's own transaction.
    let undone =
        pgonce::ledger::reverse(&client, "shop", ("ops", "1"), ("shop", "fill"), Some("wrong card")).await.unwrap();
    assert_eq!(undone.balances, [("cash".to_owned(), 0), ("wallet".to_owned(), 0)]);
    let refused = pgonce::ledger::post(&client, "shop", &Posting::new("shop", "x").debit("cash", 1, "EUR")).await;
    assert_eq!(refused.unwrap_err().sqlstate(), Some("P4090"));
    is_sound(&client).await;
}

/// Applications post, and nothing else; operators see.
#[tokio::test]
async fn roles_may_do_what_is_theirs() {
    let db = book().await;
    let client = db.client().await;
    let tries = [
        ("once_app", "SELECT kind FROM once_ledger.post('s', 'o', '{a0,a1}', '{1,-1}', '{EUR}')", Ok("posted")),
        ("once_app", "SELECT balance::text FROM once_ledger.account LIMIT 1", Err("42501")),
        ("once_app", "SELECT once_ledger.set_overdraft('a0', 5)::text", Err("42501")),
        ("once_app", "INSERT INTO once_ledger.entry VALUES (1, 1, 1, 1, 1, 1) RETURNING 'x'", Err("42501")),
        (
            "once_app",
            "SELECT kind FROM once_ledger.write_group(NULL, 's', 'p', '{a0,a1}', '{1,1}', '{EUR,EUR}', NULL, false, '')",
            Err("42501"),
        ),
        ("once_ops", "SELECT count(*)::text FROM once_ledger.accounts", Ok("6")),
        ("once_ops", "SELECT count(*)::text FROM once_ledger.verify()", Ok("0")),
        ("once_reader", "SELECT count(*)::text FROM once_ledger.entries", Ok("2")),
        ("once_reader", "SELECT kind FROM once_ledger.post('s', 'p', '{a0,a1}', '{1,-1}', '{EUR}')", Err("42501")),
    ];
    for (role, sql, expected) in tries {
        client.batch_execute(&format!("SET ROLE {role}")).await.unwrap();
        let got = client.query_one(sql, &[]).await.map(|row| row.get::<_, String>(0)).map_err(|error| code(&error));
        assert_eq!(got.as_deref().map_err(String::as_str), expected, "{role}: {sql}");
        client.batch_execute("RESET ROLE").await.unwrap();
    }
}
