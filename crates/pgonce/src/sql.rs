//! Every statement that the crate sends, and how a claim's answer is read. The rules are in `sql/`.

use tokio_postgres::types::{FromSql, Kind, Type};
use uuid::Uuid;

/// A function of the protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Call {
    Claim,
    Peek,
    Succeed,
    Fail,
    RecordFailure,
    Renew,
    Release,
    Resolve,
    Tally,
    DirectPolicy,
    DirectClaim,
    DirectPeek,
    DirectComplete,
    ClaimBatch,
    ClaimAlone,
    PeekBatch,
    SucceedBatch,
    SucceedAlone,
    RenewBatch,
    Doubt,
    Settle,
    DefineScope,
    ScopeRules,
    DatabaseId,
    Ping,
    Emit,
    DirectEmit,
    /// The same, where nobody waits for the answer: an id that is taken raises.
    DirectPost,
    Admit,
    AdmitBatch,
    NoteResult,
    Advance,
    ReceiveBatch,
    InboxTake,
    InboxFinish,
    InboxFail,
    InboxWait,
    InboxRecover,
    LedgerPost,
    LedgerReverse,
    LedgerOpen,
    EmitBatch,
    CountUncertain,
    Purge,
    PurgeInbox,
    ImportOpen,
    ImportHeader,
    ImportBegin,
    ImportApply,
    ImportRecord,
    ImportEnd,
    ImportFailures,
    ProviderRequest,
    ProviderTake,
    ProviderAnswered,
    ProviderDoubts,
    ProviderAsked,
    ProviderAskSql,
    ProviderRecover,
    ProviderSweep,
    ProviderHeard,
    ProviderOpen,
    DefineQueue,
    Enqueue,
    EnqueueBatch,
    Take,
    FinishBatch,
    RetryJob,
    BuryJob,
    GiveBack,
    HeartbeatBatch,
    CancelJob,
    LookJob,
    CountJobs,
    DueSchedules,
    FireSchedule,
    FaultSchedule,
}

impl Call {
    pub(crate) const COUNT: usize = Self::FaultSchedule as usize + 1;
}

/// The statement. A composite comes back as one value, which is cheapest; a pooler in transaction mode
/// cannot look up its type for us, so there it comes as columns.
pub(crate) fn text(call: Call, as_columns: bool) -> &'static str {
    match (call, as_columns) {
        // The wait is read after the claim: targets are computed from left to right.
        (Call::Claim, false) => {
            "SELECT once.claim($1, $2, $3, $4, $5, $6::text::interval, $7::text::interval, $8), \
             nullif(current_setting('once.waited_ms', true), '')::bigint AS waited_ms"
        }
        (Call::Claim, true) => {
            "SELECT c.*, nullif(current_setting('once.waited_ms', true), '')::bigint AS waited_ms \
             FROM once.claim($1, $2, $3, $4, $5, $6::text::interval, $7::text::interval, $8) c"
        }
        (Call::Peek, false) => "SELECT once.peek($1, $2, $3, $4)",
        (Call::Peek, true) => "SELECT * FROM once.peek($1, $2, $3, $4)",
        (Call::Succeed, _) => {
            "SELECT once.succeed(p_scope => $1, p_key => $2, p_claim_id => $3, p_response_body => $4, \
             p_response_code => $5, p_response_headers => $6, p_result_type => $7, p_result_id => $8, p_tenant => $9)"
        }
        (Call::Fail, _) => {
            "SELECT once.fail(p_scope => $1, p_key => $2, p_claim_id => $3, p_retryable => $4, p_code => $5, p_message => $6, p_tenant => $7)"
        }
        (Call::RecordFailure, false) => "SELECT once.record_failure($1, $2, $3, $4, $5, $6, $7)",
        (Call::RecordFailure, true) => "SELECT * FROM once.record_failure($1, $2, $3, $4, $5, $6, $7)",
        (Call::Renew, _) => "SELECT once.renew($1, $2, $3, $4::text::interval, $5)::text",
        (Call::Release, _) => "SELECT once.release($1, $2, $3, $4)",
        (Call::Resolve, _) => "SELECT once.resolve($1, $2, $3, $4::text::interval, $5)",
        (Call::Tally, _) => "SELECT once.tally($1, $2, $3)",
        (Call::DirectPolicy, _) => include_str!("../../../sql/direct/policy.sql"),
        (Call::DirectClaim, _) => include_str!("../../../sql/direct/claim.sql"),
        (Call::DirectPeek, _) => include_str!("../../../sql/direct/peek.sql"),
        (Call::DirectComplete, _) => include_str!("../../../sql/direct/complete.sql"),
        (Call::ClaimBatch, _) => {
            "SELECT ordinal, error, message, kind, claim_id, attempt_count, response_code, response_headers, \
             response_body, result_type, result_id, failure_code, failure_message, retry_after_ms, fence, lease_ms, \
             expires_in_ms FROM once.claim_batch($1, $2, $3, $4, $5, $6)"
        }
        (Call::ClaimAlone, false) => "SELECT once.claim_alone($1, $2, $3, $4, $5, $6)",
        (Call::ClaimAlone, true) => {
            "SELECT ordinal, error, message, kind, claim_id, attempt_count, response_code, response_headers, \
             response_body, result_type, result_id, failure_code, failure_message, retry_after_ms, fence, lease_ms, \
             expires_in_ms FROM once.claim_alone($1, $2, $3, $4, $5, $6)"
        }
        (Call::PeekBatch, _) => {
            "SELECT ordinal, error, message, kind, claim_id, attempt_count, response_code, response_headers, \
             response_body, result_type, result_id, failure_code, failure_message, retry_after_ms, fence, lease_ms, \
             expires_in_ms FROM once.peek_batch($1, $2, $3, $4)"
        }
        (Call::SucceedBatch, _) => {
            "SELECT ordinal, verdict, status, response_code, response_headers, response_body, result_type, result_id, \
             failure_code, failure_message, expires_in_ms FROM once.succeed_batch($1, $2, $3, $4, $5, $6, $7, $8, $9)"
        }
        (Call::SucceedAlone, false) => "SELECT once.succeed_alone($1, $2, $3, $4, $5, $6, $7, $8, $9)",
        (Call::SucceedAlone, true) => {
            "SELECT ordinal, verdict, status, response_code, response_headers, response_body, result_type, result_id, \
             failure_code, failure_message, expires_in_ms FROM once.succeed_alone($1, $2, $3, $4, $5, $6, $7, $8, $9)"
        }
        (Call::RenewBatch, _) => "SELECT ordinal, verdict, lease_ms FROM once.renew_batch($1, $2, $3, $4)",
        (Call::Settle, _) => {
            "SELECT once.settle(p_scope => $1, p_key => $2, p_verdict => $3, p_actor => $4, p_reason => $5, \
             p_response_code => $6, p_response_headers => $7, p_response_body => $8, p_tenant => $9)"
        }
        (Call::DefineScope, _) => "SELECT once.define_scope($1, $2)",
        (Call::ScopeRules, _) => "SELECT once.scope_rules($1)",
        // Of this cluster, this database and this installation of the schema: a dump that is restored is another one.
        (Call::DatabaseId, _) => {
            "SELECT format('%s/%s/%s', c.system_identifier, d.oid, n.oid) \
             FROM pg_catalog.pg_control_system() c, pg_catalog.pg_database d, pg_catalog.pg_namespace n \
             WHERE d.datname = pg_catalog.current_database() AND n.nspname = 'once'"
        }
        (Call::Doubt, _) => "SELECT once.doubt($1, $2, $3, $4, $5, $6)",
        (Call::Ping, _) => "SELECT 1",
        (Call::Emit, _) => {
            "SELECT once.emit(p_topic => $1, p_type => $2, p_payload => $3, p_ordering_key => $4, p_aggregate_type => $5, \
             p_aggregate_id => $6, p_aggregate_version => $7, p_headers => $8, p_scope => $9, p_key => $10, \
             p_ordinal => $11, p_message_id => $12, p_tenant => $13)"
        }
        (Call::DirectEmit, _) => include_str!("../../../sql/direct/emit.sql"),
        (Call::DirectPost, _) => {
            include_str!("../../../sql/direct/emit.sql").trim_end().trim_end_matches("ON CONFLICT DO NOTHING")
        }
        (Call::Admit, _) => "SELECT once.admit($1, $2, $3, $4, $5)",
        (Call::AdmitBatch, _) => "SELECT verdict FROM once.admit_batch($1, $2, $3, $4, $5) ORDER BY ordinal",
        (Call::NoteResult, _) => "SELECT once.note_result($1, $2, $3, $4, $5, $6, $7)",
        (Call::Advance, _) => "SELECT once.advance($1, $2, $3, $4)",
        (Call::ReceiveBatch, _) => {
            "SELECT verdict FROM once.receive_batch($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12) ORDER BY ordinal"
        }
        (Call::InboxTake, _) => {
            "SELECT id, claim_id, tenant, source, message_id, topic, type, ordering_key, entity, version, headers, \
             content_type, body, attempts FROM once.inbox_take($1, $2, $3, $4::text::interval, $5)"
        }
        (Call::InboxFinish, _) => "SELECT once.inbox_finish($1, $2, $3, $4, $5)",
        (Call::InboxFail, _) => "SELECT once.inbox_fail($1, $2, $3, $4)",
        (Call::InboxWait, _) => "SELECT once.inbox_wait($1, $2)",
        (Call::InboxRecover, _) => "SELECT count(*) FROM once.inbox_recover($1)",
        (Call::CountUncertain, _) => "SELECT once.count_uncertain()",
        (Call::Purge, _) => "SELECT once.purge($1)",
        (Call::PurgeInbox, _) => "SELECT once.purge_inbox($1)",
        (Call::EmitBatch, _) => {
            "SELECT message_id FROM once.emit_batch(p_topics => $1, p_types => $2, p_payloads => $3, p_ordering_keys => $4, \
             p_aggregate_types => $5, p_aggregate_ids => $6, p_aggregate_versions => $7, p_headers => $8, p_scope => $9, \
             p_key => $10, p_ordinals => $11, p_message_ids => $12, p_tenant => $13) ORDER BY ordinal"
        }
        (Call::LedgerPost, _) => {
            "SELECT posting_id, kind, accounts, balances FROM once_ledger.post($1, $2, $3, $4, $5, $6, $7, $8)"
        }
        (Call::LedgerReverse, _) => {
            "SELECT posting_id, kind, accounts, balances FROM once_ledger.reverse($1, $2, $3, $4, $5, $6)"
        }
        (Call::LedgerOpen, _) => "SELECT once_ledger.open_account($1, $2, $3, $4, $5)",
        (Call::ImportOpen, _) => {
            "SELECT verdict, job, claim_id, run, next_row, next_offset, next_line, applied, skipped, failed, owner, lease_ms \
             FROM once.import_open($1, $2, $3, $4, $5, $6, $7, $8::text::interval, $9, $10, $11)"
        }
        (Call::ImportHeader, _) => "SELECT once.import_header($1, $2, $3)",
        (Call::ImportBegin, _) => "SELECT once.import_begin($1, $2)",
        (Call::ImportApply, _) => {
            "SELECT n, outcome, reason, message FROM once.import_apply($1, $2, $3, $4, $5, $6, $7, $8)"
        }
        (Call::ImportRecord, _) => {
            "SELECT once.import_record($1, $2, $3, $4, $5, $6, $7::text::interval, $8, $9, $10, $11, $12, $13, $14, $15)"
        }
        (Call::ImportEnd, _) => "SELECT once.import_end($1, $2, $3, $4)",
        (Call::ImportFailures, _) => "SELECT row, line, code, message, input FROM once.import_failures($1, $2, $3, $4)",
        (Call::ProviderRequest, _) => {
            "SELECT once.call(p_provider => $1, p_operation => $2, p_path => $3, p_body => $4, p_method => $5, \
             p_headers => $6, p_scope => $7, p_key => $8, p_ordinal => $9, p_tenant => $10, p_body_bytes => $11, \
             p_content_type => $12, p_delay => $13::text::interval)"
        }
        (Call::ProviderTake, _) => {
            "SELECT id, claim_id, provider, operation, tenant, reference, base_url, key_header, header_env, timeout_ms, \
             grace_ms, method, path, headers, content_type, body, attempts FROM once.call_take($1, $2, $3, $4)"
        }
        (Call::ProviderAnswered, _) => {
            "SELECT once.call_heard($1, $2, $3, $4, $5, $6, $7, $8::text::interval, $9, $10)"
        }
        (Call::ProviderDoubts, _) => {
            "SELECT id, claim_id, provider, operation, tenant, reference, base_url, key_header, header_env, timeout_ms, \
             grace_ms, how, path, asked FROM once.call_doubts($1, $2, $3, $4)"
        }
        (Call::ProviderAsked, _) => "SELECT once.call_asked($1, $2, $3, $4, $5, $6, $7, $8::text::interval, $9, $10)",
        (Call::ProviderAskSql, _) => "SELECT once.call_ask_sql($1, $2)",
        (Call::ProviderRecover, _) => "SELECT once.call_recover($1)",
        (Call::ProviderSweep, _) => "SELECT once.call_sweep($1)",
        (Call::ProviderHeard, _) => "SELECT once.provider_heard($1, $2, $3::text::interval)",
        (Call::ProviderOpen, _) => "SELECT provider, state, calls FROM once.call_open($1)",
        (Call::DefineQueue, _) => "SELECT once.define_queue($1, $2)",
        (Call::Enqueue, _) => {
            "SELECT once.enqueue(p_queue => $1, p_payload => $2, p_priority => $3, \
             p_available_at => coalesce($4, once.clock() + $5::text::interval), p_unique_key => $6, p_attempts_max => $7, \
             p_key => $8, p_unique_scope => $9, p_unique_window => $10::text::interval, p_tenant => $11)"
        }
        (Call::EnqueueBatch, _) => {
            "SELECT once.enqueue_batch(p_queue => $1, p_payloads => $2, p_priorities => $3, \
             p_available_ats => CASE WHEN $4::timestamptz[] IS NOT NULL THEN ARRAY(SELECT coalesce(t.at, once.clock() + t.delay::interval) \
             FROM unnest($4, $5::text[]) WITH ORDINALITY t (at, delay, place) ORDER BY t.place) END, \
             p_unique_keys => $6, p_attempts_max => $7, p_keys => $8, p_unique_scope => $9, \
             p_unique_window => $10::text::interval, p_tenant => $11)"
        }
        (Call::Take, _) => {
            "SELECT id, claim_id, tenant, key, priority, payload, attempts, attempts_max, enqueued_at, place \
             FROM once.take_unsorted($1, $2, $3, $4::text::interval, $5)"
        }
        (Call::FinishBatch, _) => "SELECT once.finish_batch($1, $2, $3)",
        (Call::RetryJob, _) => "SELECT once.retry($1, $2, $3, $4::text::interval)",
        (Call::BuryJob, _) => "SELECT once.bury($1, $2, $3)",
        (Call::GiveBack, _) => "SELECT once.give_back($1, $2)",
        (Call::HeartbeatBatch, _) => "SELECT job_id, verdict FROM once.heartbeat_batch($1, $2, $3::text::interval)",
        (Call::CancelJob, _) => "SELECT once.cancel_job($1, $2)",
        (Call::LookJob, _) => "SELECT state, attempts, result, last_error FROM once.look_job($1, $2)",
        (Call::CountJobs, _) => "SELECT state, jobs, oldest_seconds FROM once.count_jobs($1)",
        (Call::DueSchedules, _) => {
            "SELECT schedule, revision, cron, timezone, missed, next_at, now FROM once.due_schedules()"
        }
        (Call::FireSchedule, _) => "SELECT once.fire_schedule($1, $2, $3, $4, $5)",
        (Call::FaultSchedule, _) => "SELECT once.fault_schedule($1, $2, $3)",
    }
}

/// The types of its parameters.
pub(crate) fn types(call: Call) -> &'static [Type] {
    match call {
        Call::Claim => {
            &[Type::TEXT, Type::TEXT, Type::BYTEA, Type::TEXT, Type::TEXT, Type::TEXT, Type::TEXT, Type::TEXT]
        }
        Call::Peek => &[Type::TEXT, Type::TEXT, Type::BYTEA, Type::TEXT],
        Call::Succeed => &[
            Type::TEXT,
            Type::TEXT,
            Type::UUID,
            Type::BYTEA,
            Type::INT4,
            Type::JSONB,
            Type::TEXT,
            Type::TEXT,
            Type::TEXT,
        ],
        Call::Fail => &[Type::TEXT, Type::TEXT, Type::UUID, Type::BOOL, Type::TEXT, Type::TEXT, Type::TEXT],
        Call::RecordFailure => &[Type::TEXT, Type::TEXT, Type::BYTEA, Type::BOOL, Type::TEXT, Type::TEXT, Type::TEXT],
        Call::Renew => &[Type::TEXT, Type::TEXT, Type::UUID, Type::TEXT, Type::TEXT],
        Call::Release => &[Type::TEXT, Type::TEXT, Type::UUID, Type::TEXT],
        Call::Resolve => &[Type::TEXT, Type::TEXT, Type::UUID, Type::TEXT, Type::TEXT],
        Call::Tally => &[Type::TEXT, Type::JSONB, Type::TEXT],
        Call::ClaimBatch => {
            &[Type::TEXT_ARRAY, Type::TEXT_ARRAY, Type::TEXT_ARRAY, Type::BYTEA_ARRAY, Type::UUID_ARRAY, Type::TEXT]
        }
        Call::ClaimAlone => &[Type::TEXT, Type::TEXT, Type::TEXT, Type::BYTEA, Type::UUID, Type::TEXT],
        Call::PeekBatch => &[Type::TEXT_ARRAY, Type::TEXT_ARRAY, Type::TEXT_ARRAY, Type::BYTEA_ARRAY],
        Call::SucceedBatch => &[
            Type::TEXT_ARRAY,
            Type::TEXT_ARRAY,
            Type::TEXT_ARRAY,
            Type::UUID_ARRAY,
            Type::INT4_ARRAY,
            Type::JSONB_ARRAY,
            Type::BYTEA_ARRAY,
            Type::TEXT_ARRAY,
            Type::TEXT_ARRAY,
        ],
        Call::SucceedAlone => &[
            Type::TEXT,
            Type::TEXT,
            Type::TEXT,
            Type::UUID,
            Type::INT4,
            Type::JSONB,
            Type::BYTEA,
            Type::TEXT,
            Type::TEXT,
        ],
        Call::RenewBatch => &[Type::TEXT_ARRAY, Type::TEXT_ARRAY, Type::TEXT_ARRAY, Type::UUID_ARRAY],
        Call::Settle => &[
            Type::TEXT,
            Type::TEXT,
            Type::TEXT,
            Type::TEXT,
            Type::TEXT,
            Type::INT4,
            Type::JSONB,
            Type::BYTEA,
            Type::TEXT,
        ],
        Call::DefineScope => &[Type::TEXT, Type::JSONB],
        Call::ScopeRules => &[Type::TEXT],
        Call::DatabaseId => &[],
        Call::Doubt => &[Type::TEXT, Type::TEXT, Type::UUID, Type::TEXT, Type::TEXT, Type::TEXT],
        Call::Ping => &[],
        Call::Emit => &[
            Type::TEXT,
            Type::TEXT,
            Type::JSONB,
            Type::TEXT,
            Type::TEXT,
            Type::TEXT,
            Type::INT8,
            Type::JSONB,
            Type::TEXT,
            Type::TEXT,
            Type::INT4,
            Type::UUID,
            Type::TEXT,
        ],
        Call::DirectEmit | Call::DirectPost => &[
            Type::TEXT,
            Type::TEXT,
            Type::JSONB,
            Type::TEXT,
            Type::TEXT,
            Type::TEXT,
            Type::INT8,
            Type::JSONB,
            Type::TEXT,
            Type::TEXT,
            Type::UUID,
            Type::TEXT,
        ],
        Call::Admit => &[Type::TEXT, Type::TEXT, Type::TEXT, Type::BYTEA, Type::TEXT],
        Call::AdmitBatch => &[Type::TEXT, Type::TEXT, Type::TEXT_ARRAY, Type::BYTEA_ARRAY, Type::TEXT],
        Call::NoteResult => &[Type::TEXT, Type::TEXT, Type::TEXT, Type::TEXT, Type::TEXT, Type::TEXT, Type::TEXT],
        Call::Advance => &[Type::TEXT, Type::TEXT, Type::INT8, Type::TEXT],
        Call::ReceiveBatch => &[
            Type::TEXT,
            Type::TEXT,
            Type::TEXT_ARRAY,
            Type::BYTEA_ARRAY,
            Type::TEXT_ARRAY,
            Type::TEXT_ARRAY,
            Type::TEXT_ARRAY,
            Type::TEXT_ARRAY,
            Type::INT8_ARRAY,
            Type::JSONB_ARRAY,
            Type::TEXT_ARRAY,
            Type::TEXT,
        ],
        Call::InboxTake => &[Type::TEXT, Type::TEXT, Type::INT4, Type::TEXT, Type::TEXT],
        Call::InboxFinish => &[Type::INT8, Type::UUID, Type::TEXT, Type::TEXT, Type::TEXT],
        Call::InboxFail => &[Type::INT8, Type::UUID, Type::BOOL, Type::TEXT],
        Call::InboxWait => &[Type::INT8, Type::UUID],
        Call::InboxRecover => &[Type::INT4],
        Call::CountUncertain => &[],
        Call::Purge | Call::PurgeInbox => &[Type::INT4],
        Call::EmitBatch => &[
            Type::TEXT_ARRAY,
            Type::TEXT_ARRAY,
            Type::JSONB_ARRAY,
            Type::TEXT_ARRAY,
            Type::TEXT_ARRAY,
            Type::TEXT_ARRAY,
            Type::INT8_ARRAY,
            Type::JSONB_ARRAY,
            Type::TEXT,
            Type::TEXT,
            Type::INT4_ARRAY,
            Type::UUID_ARRAY,
            Type::TEXT,
        ],
        Call::LedgerPost => &[
            Type::TEXT,
            Type::TEXT,
            Type::TEXT_ARRAY,
            Type::INT8_ARRAY,
            Type::TEXT_ARRAY,
            Type::TEXT,
            Type::BOOL,
            Type::TEXT,
        ],
        Call::LedgerReverse => &[Type::TEXT, Type::TEXT, Type::TEXT, Type::TEXT, Type::TEXT, Type::TEXT],
        Call::LedgerOpen => &[Type::TEXT, Type::TEXT, Type::INT8, Type::TEXT, Type::TEXT],
        Call::ImportOpen => &[
            Type::BYTEA,
            Type::INT8,
            Type::JSONB,
            Type::TEXT,
            Type::TEXT,
            Type::TEXT,
            Type::TEXT,
            Type::TEXT,
            Type::UUID,
            Type::BOOL,
            Type::TEXT,
        ],
        Call::ImportHeader => &[Type::INT8, Type::UUID, Type::BYTEA],
        Call::ImportBegin => &[Type::INT8, Type::UUID],
        Call::ImportApply => {
            &[Type::INT4, Type::TEXT, Type::TEXT, Type::TEXT, Type::TEXT, Type::TEXT, Type::INT8, Type::TEXT]
        }
        Call::ImportRecord => &[
            Type::INT8,
            Type::UUID,
            Type::INT8,
            Type::INT8,
            Type::INT8,
            Type::INT8,
            Type::TEXT,
            Type::INT8_ARRAY,
            Type::INT8_ARRAY,
            Type::INT8_ARRAY,
            Type::INT8_ARRAY,
            Type::INT8_ARRAY,
            Type::TEXT_ARRAY,
            Type::TEXT_ARRAY,
            Type::BYTEA_ARRAY,
        ],
        Call::ImportEnd => &[Type::INT8, Type::UUID, Type::TEXT, Type::TEXT],
        Call::ImportFailures => &[Type::INT8, Type::UUID, Type::INT8, Type::INT4],
        Call::ProviderRequest => &[
            Type::TEXT,
            Type::TEXT,
            Type::TEXT,
            Type::JSONB,
            Type::TEXT,
            Type::JSONB,
            Type::TEXT,
            Type::TEXT,
            Type::INT4,
            Type::TEXT,
            Type::BYTEA,
            Type::TEXT,
            Type::TEXT,
        ],
        Call::ProviderTake | Call::ProviderDoubts => &[Type::TEXT, Type::INT4, Type::TEXT, Type::TEXT_ARRAY],
        Call::ProviderAnswered | Call::ProviderAsked => &[
            Type::UUID,
            Type::UUID,
            Type::TEXT,
            Type::INT4,
            Type::JSONB,
            Type::BYTEA,
            Type::TEXT,
            Type::TEXT,
            Type::TEXT,
            Type::TEXT,
        ],
        Call::ProviderAskSql => &[Type::UUID, Type::UUID],
        Call::ProviderRecover | Call::ProviderSweep => &[Type::INT4],
        Call::ProviderHeard => &[Type::TEXT, Type::BOOL, Type::TEXT],
        Call::ProviderOpen => &[Type::TEXT],
        Call::DefineQueue => &[Type::TEXT, Type::JSONB],
        Call::Enqueue => &[
            Type::TEXT,
            Type::JSONB,
            Type::INT4,
            Type::TIMESTAMPTZ,
            Type::TEXT,
            Type::TEXT,
            Type::INT4,
            Type::TEXT,
            Type::TEXT,
            Type::TEXT,
            Type::TEXT,
        ],
        Call::EnqueueBatch => &[
            Type::TEXT,
            Type::JSONB_ARRAY,
            Type::INT4_ARRAY,
            Type::TIMESTAMPTZ_ARRAY,
            Type::TEXT_ARRAY,
            Type::TEXT_ARRAY,
            Type::INT4,
            Type::TEXT_ARRAY,
            Type::TEXT,
            Type::TEXT,
            Type::TEXT,
        ],
        Call::Take => &[Type::TEXT, Type::TEXT, Type::INT4, Type::TEXT, Type::TEXT],
        Call::FinishBatch => &[Type::INT8_ARRAY, Type::UUID_ARRAY, Type::JSONB_ARRAY],
        Call::RetryJob => &[Type::INT8, Type::UUID, Type::TEXT, Type::TEXT],
        Call::BuryJob => &[Type::INT8, Type::UUID, Type::TEXT],
        Call::GiveBack => &[Type::INT8_ARRAY, Type::UUID_ARRAY],
        Call::HeartbeatBatch => &[Type::INT8_ARRAY, Type::UUID_ARRAY, Type::TEXT],
        Call::CancelJob | Call::LookJob => &[Type::INT8, Type::TEXT],
        Call::CountJobs => &[Type::TEXT],
        Call::DueSchedules => &[],
        Call::FireSchedule => &[Type::TEXT, Type::INT4, Type::TIMESTAMPTZ, Type::TIMESTAMPTZ, Type::BOOL],
        Call::FaultSchedule => &[Type::TEXT, Type::INT4, Type::TEXT],
        Call::DirectPolicy => &[Type::TEXT, Type::TEXT],
        Call::DirectClaim | Call::DirectPeek => &[Type::TEXT, Type::TEXT, Type::BYTEA, Type::TEXT],
        Call::DirectComplete => &[
            Type::TEXT,
            Type::TEXT,
            Type::BYTEA,
            Type::TEXT,
            Type::UUID,
            Type::INT8,
            Type::INT8,
            Type::INT4,
            Type::JSONB,
            Type::BYTEA,
            Type::TEXT,
            Type::TEXT,
        ],
    }
}

/// `once.claim_result`, as it comes.
#[derive(Debug, Clone, Default)]
pub struct ClaimRow {
    pub(crate) kind: Option<String>,
    pub(crate) claim_id: Option<Uuid>,
    pub(crate) attempt_count: Option<i32>,
    pub(crate) response_code: Option<i32>,
    pub(crate) response_headers: Option<serde_json::Value>,
    pub(crate) response_body: Option<Vec<u8>>,
    pub(crate) result_type: Option<String>,
    pub(crate) result_id: Option<String>,
    pub(crate) failure_code: Option<String>,
    pub(crate) failure_message: Option<String>,
    pub(crate) retry_after_ms: Option<i64>,
    pub(crate) fence: Option<i64>,
    pub(crate) lease_ms: Option<i64>,
    /// How long the claim waited for a rival, where it did.
    pub(crate) waited_ms: Option<i64>,
}

type Fault = Box<dyn std::error::Error + Sync + Send>;

impl<'a> FromSql<'a> for ClaimRow {
    fn from_sql(_: &Type, raw: &'a [u8]) -> Result<Self, Fault> {
        Self::from_fields(&mut CompositeFields::new(raw)?)
    }

    fn accepts(kind: &Type) -> bool {
        matches!(kind.kind(), Kind::Composite(_))
    }
}

impl ClaimRow {
    /// From the fields of a composite, or the part of one that is a `once.claim_result`.
    pub(crate) fn from_fields(fields: &mut CompositeFields<'_>) -> Result<Self, Fault> {
        let mut row = Self {
            kind: fields.read()?,
            claim_id: fields.read()?,
            attempt_count: fields.read()?,
            response_code: fields.read()?,
            response_headers: fields.read()?,
            response_body: fields.read()?,
            result_type: fields.read()?,
            result_id: fields.read()?,
            failure_code: fields.read()?,
            failure_message: fields.read()?,
            ..Self::default()
        };
        fields.skip()?; // locked_until
        row.retry_after_ms = fields.read()?;
        fields.skip()?; // expires_at
        row.fence = fields.read()?;
        row.lease_ms = fields.read()?;
        Ok(row)
    }

    /// From a row whose first column is the composite, or whose columns are its fields.
    pub(crate) fn read(row: &tokio_postgres::Row) -> Result<Self, tokio_postgres::Error> {
        let waited_ms = match row.columns().last() {
            Some(last) if last.name() == "waited_ms" => row.try_get(row.len() - 1)?,
            _ => None,
        };
        if row.columns().first().is_some_and(|first| matches!(first.type_().kind(), Kind::Composite(_))) {
            let read = row.try_get::<_, Option<Self>>(0)?.unwrap_or_default();
            return Ok(Self { waited_ms, ..read });
        }
        Ok(Self {
            kind: row.try_get("kind")?,
            claim_id: row.try_get("claim_id")?,
            attempt_count: row.try_get("attempt_count")?,
            response_code: row.try_get("response_code")?,
            response_headers: row.try_get("response_headers")?,
            response_body: row.try_get("response_body")?,
            result_type: row.try_get("result_type")?,
            result_id: row.try_get("result_id")?,
            failure_code: row.try_get("failure_code")?,
            failure_message: row.try_get("failure_message")?,
            retry_after_ms: row.try_get("retry_after_ms")?,
            fence: row.try_get("fence")?,
            lease_ms: row.try_get("lease_ms")?,
            waited_ms,
        })
    }
}

/// The binary form of a composite: a count, then for each field its type, its length and its bytes.
pub(crate) struct CompositeFields<'a> {
    rest: &'a [u8],
    left: i32,
}

impl<'a> CompositeFields<'a> {
    pub(crate) fn new(raw: &'a [u8]) -> Result<Self, Fault> {
        let mut fields = Self { rest: raw, left: 0 };
        fields.left = fields.int()?;
        Ok(fields)
    }

    fn int(&mut self) -> Result<i32, Fault> {
        let (head, rest) = self.rest.split_first_chunk::<4>().ok_or("composite value is cut short")?;
        self.rest = rest;
        Ok(i32::from_be_bytes(*head))
    }

    fn next(&mut self) -> Result<Option<(Type, &'a [u8])>, Fault> {
        if self.left == 0 {
            return Ok(None); // an older schema: fields that it does not know are absent
        }
        self.left -= 1;
        let oid = self.int()?;
        let length = self.int()?;
        if length < 0 {
            return Ok(None);
        }
        let (value, rest) =
            self.rest.split_at_checked(usize::try_from(length)?).ok_or("composite value is cut short")?;
        self.rest = rest;
        let kind = Type::from_oid(u32::from_be_bytes(oid.to_be_bytes())).unwrap_or(Type::TEXT);
        Ok(Some((kind, value)))
    }

    pub(crate) fn read<T: FromSql<'a>>(&mut self) -> Result<Option<T>, Fault> {
        match self.next()? {
            Some((kind, value)) => Ok(Some(T::from_sql(&kind, value)?)),
            None => Ok(None),
        }
    }

    pub(crate) fn skip(&mut self) -> Result<(), Fault> {
        self.next().map(|_| ())
    }
}
