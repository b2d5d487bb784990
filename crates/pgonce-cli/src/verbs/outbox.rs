//! `pgonce outbox`: where messages are, what a sink did not take, and sending again.

use std::time::{Duration, Instant};

use clap::{Args, Subcommand};
use indicatif::{ProgressBar, ProgressStyle};
use pgonce_relay::relay::replay::{Progress, Replay};
use serde_json::{Map, Value, json};
use tokio_postgres::Client;
use tokio_postgres::types::Type;

use crate::database::{self, Param};
use crate::decision::Decision;
use crate::output::{Column, Out, say};
use crate::verbs::relay;
use crate::verbs::up::stop_watch;
use crate::{Found, WrongUse};

/// `pgonce outbox …`
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Each sink, what it has not got yet, and the log's segments
    Status,
    /// Messages that a sink did not take
    Parked {
        /// Only of this sink
        #[arg(long)]
        sink: Option<String>,
    },
    /// Try parked messages again
    Resume(HeldOptions),
    /// Let parked messages go: the sink never gets them, what is behind them goes on
    Discard(HeldOptions),
    /// Send a sink what it got before: all of it, or what is chosen
    Replay(ReplayOptions),
    /// End a replay that nobody goes on with: nothing is kept for it any more
    AbandonReplay {
        /// Its number
        id: i64,
        #[command(flatten)]
        decision: Decision,
    },
    /// Let a disabled sink work again
    ResumeSink(SinkOptions),
    /// Forget a sink that is not used any more: nothing is kept for it
    ForgetSink(SinkOptions),
    /// Make this database the log's home, after a dump was restored or the cluster was upgraded
    Adopt(Decision),
    /// How long delivered messages are kept for replay
    Keep {
        /// As 12h or 7d; 0d keeps nothing
        #[arg(value_name = "DURATION")]
        retention: String,
    },
}

/// Which parked messages.
#[derive(Debug, Args)]
pub struct HeldOptions {
    /// The sink's name, as `pgonce outbox status` shows it
    #[arg(long)]
    sink: String,
    /// Only the one at this position
    #[arg(long, required_unless_present = "all")]
    position: Option<i64>,
    /// All parked ones
    #[arg(long, conflicts_with = "position")]
    all: bool,
    #[command(flatten)]
    decision: Decision,
}

/// Which sink.
#[derive(Debug, Args)]
pub struct SinkOptions {
    /// Its name, as `pgonce outbox status` shows it
    #[arg(long)]
    sink: String,
    #[command(flatten)]
    decision: Decision,
}

/// `pgonce outbox replay`
#[derive(Debug, Args)]
pub struct ReplayOptions {
    /// The sink's URL, as for relay: it gets them again
    #[arg(long, value_name = "URL")]
    sink: String,
    /// Go on with a replay that was stopped
    #[arg(long, value_name = "ID", conflicts_with_all = ["from", "to", "topic", "type", "ordering_key", "tenant", "message_id", "from_position", "to_position"])]
    resume: Option<i64>,
    /// Emitted at this time or later
    #[arg(long, value_name = "TIME")]
    from: Option<String>,
    /// Emitted before this time
    #[arg(long, value_name = "TIME")]
    to: Option<String>,
    /// From this position
    #[arg(long)]
    from_position: Option<i64>,
    /// Up to this position
    #[arg(long)]
    to_position: Option<i64>,
    /// Only this topic, with * for anything
    #[arg(long, value_name = "PATTERN")]
    topic: Option<String>,
    /// Only this type, with * for anything
    #[arg(long, value_name = "PATTERN")]
    r#type: Option<String>,
    /// Only this ordering key
    #[arg(long, value_name = "KEY")]
    ordering_key: Option<String>,
    /// Only this tenant
    #[arg(long)]
    tenant: Option<String>,
    /// Only this message
    #[arg(long, value_name = "UUID")]
    message_id: Option<uuid::Uuid>,
    /// Messages a second
    #[arg(long, value_parser = clap::value_parser!(i32).range(1..=1_000_000))]
    rate: Option<i32>,
    /// Only count
    #[arg(long)]
    dry_run: bool,
    /// Why: goes into the audit trail
    #[arg(long, required_unless_present_any = ["dry_run", "resume"], default_value = "")]
    reason: String,
    /// Who
    #[arg(long, env = "USER", hide_env = true)]
    actor: Option<String>,
}

const SINKS: &[Column] = &[
    ("SINK", "sink"),
    ("LAG", "lag_messages"),
    ("SECONDS", "lag_seconds"),
    ("FAILING", "failing"),
    ("PARKED", "parked"),
    ("BEHIND", "behind"),
    ("RELAYS", "relays"),
    ("DISABLED", "disabled"),
    ("MOVED", "moved_at"),
];
const SEGMENTS: &[Column] =
    &[("SEGMENT", "segment"), ("BYTES", "bytes"), ("ROWS ABOUT", "rows_estimated"), ("CURRENT", "current")];
const PARKED: &[Column] = &[
    ("SINK", "sink"),
    ("POSITION", "position"),
    ("TYPE", "type"),
    ("KEY", "lane_key"),
    ("STATE", "state"),
    ("ATTEMPTS", "attempts"),
    ("BEHIND", "behind"),
    ("ERROR", "last_error"),
    ("SINCE", "held_at"),
];

/// Runs one of them.
pub async fn run(command: Command, url: &str, out: Out) -> anyhow::Result<()> {
    let client = database::connect(url).await?;
    match command {
        Command::Status => status(&client, out).await,
        Command::Parked { sink } => parked(sink.as_deref(), &client, out).await,
        Command::Resume(options) => held(&options, false, &client, out).await,
        Command::Discard(options) => held(&options, true, &client, out).await,
        Command::Replay(options) => replay(options, url, &client, out).await,
        Command::AbandonReplay { id, decision } => abandon_replay(id, &decision, &client, out).await,
        Command::ResumeSink(options) => resume_sink(&options, false, &client, out).await,
        Command::ForgetSink(options) => resume_sink(&options, true, &client, out).await,
        Command::Adopt(decision) => adopt(&decision, &client, out).await,
        Command::Keep { retention } => keep(&retention, &client, out).await,
    }
}

async fn status(client: &Client, out: Out) -> anyhow::Result<()> {
    let sinks = database::json_rows(client, "SELECT to_jsonb(s) FROM once.sinks s ORDER BY s.sink", &[]).await?;
    let sql = "SELECT to_jsonb(s) FROM once.outbox_segments s WHERE s.bytes > 65536 OR s.current ORDER BY s.segment";
    let segments = database::json_rows(client, sql, &[]).await?;
    if out.json {
        return Ok(out.value(&json!({"sinks": sinks, "segments": segments}))?);
    }
    if sinks.is_empty() {
        say("No sink yet: the first `pgonce relay --sink …` makes one. Until then everything is kept.");
    } else {
        out.rows(SINKS, &sinks)?;
    }
    out.line("")?;
    Ok(out.rows(SEGMENTS, &segments)?)
}

async fn parked(sink: Option<&str>, client: &Client, out: Out) -> anyhow::Result<()> {
    let sql = "SELECT to_jsonb(p) FROM once.outbox_parked p WHERE $1::text IS NULL OR p.sink = $1 ORDER BY p.sink, p.position LIMIT 1000";
    let rows = database::json_rows(client, sql, &[(&sink, Type::TEXT)]).await?;
    out.rows(PARKED, &rows)?;
    if rows.is_empty() {
        say("Nothing is parked, and nothing is failing.");
    }
    Ok(())
}

async fn held(options: &HeldOptions, discard: bool, client: &Client, out: Out) -> anyhow::Result<()> {
    let actor = options.decision.actor()?;
    let params: [Param<'_>; 5] = [
        (&options.sink, Type::TEXT),
        (&options.position, Type::INT8),
        (&actor, Type::TEXT),
        (&options.decision.reason, Type::TEXT),
        (&discard, Type::BOOL),
    ];
    let count = database::json_row(client, "SELECT to_jsonb(once.resume_held($1, $2, $3, $4, $5))", &params).await?;
    let done = if discard { "discarded" } else { "to be tried again" };
    tell(out, json!({"sink": options.sink, "messages": count, "discarded": discard}), &format!("{count} {done}"))?;
    if count == json!(0) {
        say("No such parked message: see pgonce outbox parked.");
        return Err(Found.into());
    }
    Ok(())
}

async fn resume_sink(options: &SinkOptions, forget: bool, client: &Client, out: Out) -> anyhow::Result<()> {
    let actor = options.decision.actor()?;
    let params: [Param<'_>; 4] = [
        (&options.sink, Type::TEXT),
        (&actor, Type::TEXT),
        (&options.decision.reason, Type::TEXT),
        (&forget, Type::BOOL),
    ];
    let done = database::json_row(client, "SELECT to_jsonb(once.resume_sink($1, $2, $3, $4))", &params).await?;
    if done == json!(true) {
        let text = if forget { "forgotten" } else { "works again" };
        return tell(out, json!({"sink": options.sink, "forgotten": forget}), &format!("{}: {text}", options.sink));
    }
    say(if forget { "No such sink, or a relay still works for it." } else { "No such sink, or it is not disabled." });
    Err(Found.into())
}

async fn abandon_replay(id: i64, decision: &Decision, client: &Client, out: Out) -> anyhow::Result<()> {
    let actor = decision.actor()?;
    let params: [Param<'_>; 3] = [(&id, Type::INT8), (&actor, Type::TEXT), (&decision.reason, Type::TEXT)];
    let done = database::json_row(client, "SELECT to_jsonb(once.abandon_replay($1, $2, $3))", &params).await?;
    if done == json!(true) {
        return tell(out, json!({"replay": id, "abandoned": true}), &format!("replay {id} is abandoned"));
    }
    say("No such replay, or it is finished.");
    Err(Found.into())
}

async fn adopt(decision: &Decision, client: &Client, out: Out) -> anyhow::Result<()> {
    let actor = decision.actor()?;
    let params: [Param<'_>; 2] = [(&actor, Type::TEXT), (&decision.reason, Type::TEXT)];
    let count = database::json_row(client, "SELECT to_jsonb(once.adopt_outbox($1, $2))", &params).await?;
    tell(
        out,
        json!({"to_be_sent_again": count}),
        &format!("adopted; {count} messages cannot be proven delivered and will be sent again, under their old ids"),
    )
}

async fn keep(retention: &str, client: &Client, out: Out) -> anyhow::Result<()> {
    let kept = if retention == "0d" { Duration::ZERO } else { database::duration(retention).map_err(WrongUse)? };
    let seconds = i64::try_from(kept.as_secs())?;
    let sql = "SELECT to_jsonb(once.keep_outbox($1 * interval '1 second')::text)";
    database::json_row(client, sql, &[(&seconds, Type::INT8)]).await?;
    tell(out, json!({"retention_seconds": seconds}), &format!("delivered messages are kept for {retention}"))
}

fn tell(out: Out, value: Value, text: &str) -> anyhow::Result<()> {
    if out.json {
        out.value(&value)?;
    } else {
        out.line(text)?;
    }
    Ok(())
}

fn selection(options: &ReplayOptions) -> Value {
    let mut chosen = Map::new();
    let mut choose = |name: &str, value: Option<Value>| drop(value.map(|value| chosen.insert(name.to_owned(), value)));
    choose("from_time", options.from.clone().map(Value::from));
    choose("to_time", options.to.clone().map(Value::from));
    choose("from_position", options.from_position.map(Value::from));
    choose("to_position", options.to_position.map(Value::from));
    choose("topic", options.topic.as_deref().map(|pattern| relay::like(pattern).into()));
    choose("type", options.r#type.as_deref().map(|pattern| relay::like(pattern).into()));
    choose("ordering_key", options.ordering_key.clone().map(Value::from));
    choose("tenant", options.tenant.clone().map(Value::from));
    choose("message_id", options.message_id.map(|id| id.to_string().into()));
    Value::Object(chosen)
}

async fn replay(options: ReplayOptions, url: &str, client: &Client, out: Out) -> anyhow::Result<()> {
    let (target, sink) = relay::open(&options.sink)?;
    let name = target.name().to_owned();
    let id = match options.resume {
        Some(id) => id,
        None => {
            let decision = Decision { reason: options.reason.clone(), actor: options.actor.clone() };
            let actor = if options.dry_run { "" } else { decision.actor()? };
            let chosen = selection(&options);
            let params: [Param<'_>; 6] = [
                (&name, Type::TEXT),
                (&chosen, Type::JSONB),
                (&actor, Type::TEXT),
                (&options.reason, Type::TEXT),
                (&options.rate, Type::INT4),
                (&options.dry_run, Type::BOOL),
            ];
            let sql = "SELECT to_jsonb(r) FROM once.ask_replay($1, $2, $3, $4, $5, $6) r";
            let asked = database::json_row(client, sql, &params).await?;
            if options.dry_run {
                let text = format!(
                    "{} messages would be sent again to {name}, emitted from {} to {}; nothing was sent",
                    asked["messages"],
                    asked["oldest"].as_str().unwrap_or("-"),
                    asked["newest"].as_str().unwrap_or("-")
                );
                return tell(out, asked, &text);
            }
            asked["id"].as_i64().unwrap_or_default()
        }
    };
    // Standard output is the sink's, where that is one.
    let told = (target.scheme != "stdout").then_some(out);
    carry_out(id, &name, url, sink, told).await
}

/// Sends, with progress; Ctrl-C stops it where it is.
async fn carry_out(
    id: i64,
    name: &str,
    url: &str,
    sink: std::sync::Arc<dyn pgonce_relay::Sink>,
    out: Option<Out>,
) -> anyhow::Result<()> {
    let stop = stop_watch()?;
    let bar = ProgressBar::new_spinner();
    bar.set_style(ProgressStyle::with_template("{spinner} {msg}")?);
    bar.enable_steady_tick(Duration::from_millis(200));
    let started = Instant::now();
    let shown = |progress: Progress| {
        let rate = progress.sent as f64 / started.elapsed().as_secs_f64().max(0.001);
        bar.set_message(format!("{} sent again, {rate:.0}/s", progress.sent));
    };
    let ended = Replay { database_url: url.to_owned(), id, sink: name.to_owned() }.run(sink, stop, shown).await;
    bar.finish_and_clear();
    let progress = ended?;
    let value = json!({"replay": id, "sink": name, "sent": progress.sent, "failed": progress.failed, "finished": progress.finished});
    let text = format!("{} sent again to {name}, {} not taken", progress.sent, progress.failed);
    match out {
        Some(out) => tell(out, value, &text)?,
        None => say(&text),
    }
    if !progress.finished {
        say(&format!("Stopped. Go on with: pgonce outbox replay --sink URL --resume {id}"));
        return Err(Found.into());
    }
    if progress.failed > 0 { Err(Found.into()) } else { Ok(()) }
}
