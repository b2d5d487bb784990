//! What each SQLSTATE means for a retry: the one table. See docs/reference/errors.md.

/// What to do after an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Run the whole transaction again, from its start.
    Again,
    /// Run it again later: the server is busy, restarting or out of something.
    Later,
    /// Another intent won a business constraint, or this one did before: ask the intent's row.
    Classify,
    /// It will fail the same way every time.
    Final,
    /// The effect is not ours to keep: ownership is lost.
    Lost,
    /// The outcome is not known until the intent's row is asked.
    InDoubt,
}

/// SQLSTATEs that PostgreSQL and pgonce raise, most specific first; a two-letter entry is a whole class.
const TABLE: &[(&str, Verdict)] = &[
    ("40001", Verdict::Again),    // serialization failure, or a rival settled the intent first
    ("40P01", Verdict::Again),    // deadlock
    ("40003", Verdict::InDoubt),  // statement completion unknown
    ("55P03", Verdict::Later),    // lock not available in time
    ("25P03", Verdict::Later),    // idle in transaction too long: rolled back
    ("57014", Verdict::Final),    // cancelled, or statement_timeout: again would take as long
    ("57P01", Verdict::Later),    // terminated by an administrator
    ("57P02", Verdict::Later),    // crash of another server process
    ("57P03", Verdict::Later),    // starting up or shutting down
    ("25006", Verdict::Later),    // read-only: a standby, or a failover under way
    ("53", Verdict::Later),       // out of connections, memory or disk
    ("08", Verdict::Later),       // connection trouble before COMMIT was sent
    ("23505", Verdict::Classify), // unique violation
    ("23P01", Verdict::Classify), // exclusion violation
    ("P4000", Verdict::Final),
    ("P4001", Verdict::Final),
    ("P4002", Verdict::Final),
    ("P4003", Verdict::Final),
    ("P4004", Verdict::Final),
    ("P4005", Verdict::Final),
    ("P4010", Verdict::Lost),
    ("P4011", Verdict::Lost),
    ("P4012", Verdict::Lost),
    ("P4013", Verdict::Final),
    ("P4020", Verdict::Final),
    ("P4029", Verdict::Later),
    ("P4030", Verdict::Final),
    ("P4040", Verdict::Final), // a message that cannot be emitted
    ("P4041", Verdict::Final), // a message id with another content
    ("P4070", Verdict::Final), // the outbox is from another database
    ("P4071", Verdict::Lost),  // a relay's lane was taken over
    ("P4050", Verdict::Final),
    ("P4051", Verdict::Lost),
    ("P4060", Verdict::Lost),  // a job that this worker does not hold
    ("P4064", Verdict::Final), // a take in another isolation level
    ("P4061", Verdict::Lost),  // another worker has the call
    ("P4062", Verdict::Final), // a call with another request
    ("P4063", Verdict::Final), // a call that cannot be made
    ("P4080", Verdict::Final),
    ("P4081", Verdict::Lost),  // an import was taken over
    ("P4090", Verdict::Final), // cannot be posted
    ("P4091", Verdict::Final), // does not balance
    ("P4092", Verdict::Final), // no such account, or of another currency
    ("P4093", Verdict::Final), // beyond an overdraft
    ("P4094", Verdict::Final), // the operation was posted with other entries
    ("P4095", Verdict::Final), // cannot be reversed
    ("P4096", Verdict::Final), // the ledger is never changed
    ("P4099", Verdict::Final),
    ("23", Verdict::Final), // not-null, check and foreign-key violations
    ("22", Verdict::Final), // bad data
    ("42", Verdict::Final), // the statement itself is wrong, or not allowed
];

/// The verdict for a SQLSTATE. What the table does not know is final: guessing "again" could loop for ever.
#[must_use]
pub fn verdict(sqlstate: &str) -> Verdict {
    TABLE.iter().find(|(code, _)| sqlstate.starts_with(code)).map_or(Verdict::Final, |(_, verdict)| *verdict)
}

/// The verdict for a driver error. A connection that broke has no SQLSTATE.
pub(crate) fn verdict_of(error: &tokio_postgres::Error) -> Verdict {
    match error.code() {
        Some(code) => verdict(code.code()),
        None if is_disconnect(error) => Verdict::Later,
        None => Verdict::Final,
    }
}

/// Whether the connection is gone, so that nothing more is known of what it was doing.
pub(crate) fn is_disconnect(error: &tokio_postgres::Error) -> bool {
    use std::error::Error as _;
    error.is_closed()
        || error.code().is_some_and(|code| {
            matches!(code.code(), "57P01" | "57P02" | "57P03" | "25P03") || code.code().starts_with("08")
        })
        || error.source().is_some_and(|source| source.is::<std::io::Error>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn specific_codes_come_before_their_class() {
        assert_eq!(verdict("23505"), Verdict::Classify);
        assert_eq!(verdict("23514"), Verdict::Final);
        assert_eq!(verdict("40001"), Verdict::Again);
        assert_eq!(verdict("53300"), Verdict::Later);
        assert_eq!(verdict("XX000"), Verdict::Final);
        for (position, (code, verdict_here)) in TABLE.iter().enumerate() {
            let shadowed = TABLE[..position].iter().any(|(earlier, _)| code.starts_with(earlier));
            assert!(!shadowed, "{code} is hidden by an earlier entry");
            assert_eq!(verdict(code), *verdict_here);
        }
    }
}
