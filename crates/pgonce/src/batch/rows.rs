//! What the functions of a batch answer: a row an intent, its columns by themselves, or as one composite value where
//! there is one intent only, which is cheaper.

use std::error::Error as StdError;

use tokio_postgres::Row;
use tokio_postgres::types::{FromSql, Kind, Type};

use crate::claim::Answer;
use crate::sql::{ClaimRow, CompositeFields};

type Fault = Box<dyn StdError + Sync + Send>;

fn is_composite(kind: &Type) -> bool {
    matches!(kind.kind(), Kind::Composite(_))
}

/// Whether the row is one composite value.
fn is_one_value(row: &Row) -> bool {
    row.columns().first().is_some_and(|first| is_composite(first.type_()))
}

/// `once.claim_answer`.
#[derive(Debug)]
pub(super) struct ClaimAnswer {
    pub(super) error: Option<String>,
    pub(super) message: Option<String>,
    pub(super) row: ClaimRow,
    pub(super) expires_in_ms: Option<i64>,
}

impl ClaimAnswer {
    pub(super) fn read(row: &Row) -> Result<Self, tokio_postgres::Error> {
        if is_one_value(row) {
            return row.try_get(0);
        }
        Ok(Self {
            error: row.try_get(1)?,
            message: row.try_get(2)?,
            row: ClaimRow {
                kind: row.try_get(3)?,
                claim_id: row.try_get(4)?,
                attempt_count: row.try_get(5)?,
                response_code: row.try_get(6)?,
                response_headers: row.try_get(7)?,
                response_body: row.try_get(8)?,
                result_type: row.try_get(9)?,
                result_id: row.try_get(10)?,
                failure_code: row.try_get(11)?,
                failure_message: row.try_get(12)?,
                retry_after_ms: row.try_get(13)?,
                fence: row.try_get(14)?,
                lease_ms: row.try_get(15)?,
                waited_ms: None, // a batch never waits
            },
            expires_in_ms: row.try_get(16)?,
        })
    }
}

impl<'a> FromSql<'a> for ClaimAnswer {
    fn from_sql(_: &Type, raw: &'a [u8]) -> Result<Self, Fault> {
        let mut fields = CompositeFields::new(raw)?;
        fields.skip()?; // ordinal
        Ok(Self {
            error: fields.read()?,
            message: fields.read()?,
            row: ClaimRow::from_fields(&mut fields)?,
            expires_in_ms: fields.read()?,
        })
    }

    fn accepts(kind: &Type) -> bool {
        is_composite(kind)
    }
}

/// `once.completion_answer`.
#[derive(Debug)]
pub(super) struct CompletionAnswer {
    pub(super) verdict: Option<String>,
    pub(super) status: Option<String>,
    pub(super) answer: Answer,
    pub(super) failure_code: Option<String>,
    pub(super) failure_message: Option<String>,
    pub(super) expires_in_ms: Option<i64>,
}

impl CompletionAnswer {
    pub(super) fn read(row: &Row) -> Result<Self, tokio_postgres::Error> {
        if is_one_value(row) {
            return row.try_get(0);
        }
        Ok(Self {
            verdict: row.try_get(1)?,
            status: row.try_get(2)?,
            answer: Answer {
                code: row.try_get(3)?,
                headers: row.try_get(4)?,
                body: row.try_get(5)?,
                result_type: row.try_get(6)?,
                result_id: row.try_get(7)?,
            },
            failure_code: row.try_get(8)?,
            failure_message: row.try_get(9)?,
            expires_in_ms: row.try_get(10)?,
        })
    }
}

impl<'a> FromSql<'a> for CompletionAnswer {
    fn from_sql(_: &Type, raw: &'a [u8]) -> Result<Self, Fault> {
        let mut fields = CompositeFields::new(raw)?;
        fields.skip()?; // ordinal
        Ok(Self {
            verdict: fields.read()?,
            status: fields.read()?,
            answer: Answer {
                code: fields.read()?,
                headers: fields.read()?,
                body: fields.read()?,
                result_type: fields.read()?,
                result_id: fields.read()?,
            },
            failure_code: fields.read()?,
            failure_message: fields.read()?,
            expires_in_ms: fields.read()?,
        })
    }

    fn accepts(kind: &Type) -> bool {
        is_composite(kind)
    }
}
