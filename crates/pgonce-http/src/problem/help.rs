//! What is said of a problem to somebody who followed its link: the same for every occurrence.

use std::time::Duration;

use serde_json::{Value, json};

use super::{BASE, Problem, SLUGS};
use crate::KeyError;

impl Problem {
    /// One of each, with nothing particular in it, in the order of [`SLUGS`].
    fn examples() -> [Self; SLUGS.len()] {
        let retry_after = Duration::from_secs(1);
        [
            Self::KeyMissing,
            Self::KeyMalformed(KeyError::Refused),
            Self::BodyTooLarge { limit: 0 },
            Self::BodyIncomplete,
            Self::BodyTimeout,
            Self::Conflict,
            Self::InProgress { retry_after },
            Self::FailedBefore { code: String::new() },
            Self::TryAgain,
            Self::Uncertain,
            Self::InDoubt,
            Self::ResultExpired,
            Self::ResponseNotStored { code: None },
            Self::TenantMissing,
            Self::TenantRefused,
            Self::Overloaded { retry_after },
            Self::QuotaExceeded { retry_after },
            Self::DatabaseAway,
            Self::HomeAway,
            Self::UpstreamAway,
            Self::UpstreamTimeout,
            Self::UpstreamUncertain { upstream_status: None },
            Self::UpstreamFailed { upstream_status: None },
            Self::LeaseLost,
            Self::HandlerFailed,
            Self::TransactionKept,
            Self::NotGuarded,
            Self::Malformed(String::new()),
            Self::Internal,
        ]
    }

    /// What there is to say about the problems of a slug: `type`, `title`, `status` (where no route maps it to
    /// another), `effect`, `retryable` and `what_to_do`. None where no problem is called so.
    #[must_use]
    pub fn help(slug: &str) -> Option<Value> {
        let problem = Self::examples().into_iter().find(|problem| problem.slug() == slug)?;
        Some(json!({
            "type": format!("{BASE}{slug}"),
            "title": problem.title(),
            "status": problem.default_status().as_u16(),
            "effect": problem.effect().as_str(),
            "retryable": problem.is_retryable(),
            "what_to_do": problem.advice(),
        }))
    }

    /// The detail, without what only an occurrence knows.
    fn advice(&self) -> String {
        let text = match self {
            Self::KeyMalformed(_) => {
                "Nothing was run. A key is one string of 1 to 255 ASCII characters in double quotes, in one header \
                 line; the member detail says what is wrong with this one."
            }
            Self::BodyTooLarge { .. } => {
                "Nothing was run. Bodies of guarded requests may have as many bytes as the member limit_bytes says."
            }
            Self::Malformed(_) => "Nothing was run. The member detail says what is wrong with the request.",
            _ => return self.detail(),
        };
        text.to_owned()
    }
}
