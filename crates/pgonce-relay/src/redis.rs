//! What the sink and the source of Redis share: reading the URL.

use redis::Client;

use crate::{Target, TargetError};

/// A client, which connects nowhere yet.
pub(crate) fn client(target: &Target) -> Result<Client, TargetError> {
    crate::tls::choose_provider();
    Client::open(target.url.as_str()).map_err(|_| TargetError("Redis cannot read the URL".into()))
}
