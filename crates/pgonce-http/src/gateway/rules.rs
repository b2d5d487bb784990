//! The rules of scopes are the database's: every caller of a scope lives by the same, and whoever defines it replaces
//! them. Two gateways that mean different things by one scope would do so in turns: that is noticed, and told.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use pgonce::Batcher;
use serde_json::Value;

use super::GatewayError;
use super::config::GatewayConfig;

/// How often the database is asked whether a scope's rules are still ours.
const LOOK_EVERY: Duration = Duration::from_secs(5);

/// The rules that this gateway gave to its scopes, as the database keeps them.
#[derive(Debug, Default)]
pub(super) struct Rules(Mutex<BTreeMap<String, Given>>);

#[derive(Debug)]
struct Given {
    rules: Value,
    /// By somebody else, since; told once.
    replaced: bool,
}

impl Rules {
    /// Gives the scopes of a configuration their rules.
    pub(super) async fn define(&self, batcher: &Batcher, config: &GatewayConfig) -> Result<(), GatewayError> {
        let mut all = BTreeMap::new();
        for (scope, policy) in config.scope_policies() {
            let before = rules(batcher, &scope).await;
            batcher.define_scope(&scope, &policy).await?;
            let Some(rules) = rules(batcher, &scope).await else { continue };
            // Our own of before a reload are nobody else's.
            if before.is_some_and(|before| before != rules && !self.gave(&scope, &before)) {
                tracing::warn!(
                    scope,
                    "this scope had other rules, and has this gateway's now: whoever gave it those lives \
                    by these. Services that mean different things need scopes of their own (--scope)"
                );
            }
            all.insert(scope, Given { rules, replaced: false });
        }
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = all;
        Ok(())
    }

    fn gave(&self, scope: &str, rules: &Value) -> bool {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.get(scope).is_some_and(|given| given.rules == *rules)
    }

    /// Looks, now and then, whether somebody else has replaced them. Nothing is put back: two that did so would never
    /// come to an end.
    pub(super) async fn watch(&self, batcher: &Batcher) {
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            let scopes: Vec<String> = self.0.lock().unwrap_or_else(PoisonError::into_inner).keys().cloned().collect();
            for scope in scopes {
                if let Some(rules) = rules(batcher, &scope).await {
                    self.found(&scope, &rules);
                }
            }
        }
    }

    fn found(&self, scope: &str, rules: &Value) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(given) = all.get_mut(scope) else { return };
        let replaced = given.rules != *rules;
        if replaced && !given.replaced {
            tracing::warn!(
                scope,
                "somebody else gave this scope other rules: this gateway lives by them now, and not by its \
                own configuration. Give it a scope of its own (--scope), or both the same rules"
            );
        }
        given.replaced = replaced;
    }

    /// How many scopes have somebody else's rules.
    pub(super) fn replaced(&self) -> usize {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.values().filter(|given| given.replaced).count()
    }
}

/// None where they cannot be read: a database whose schema is older does not tell.
async fn rules(batcher: &Batcher, scope: &str) -> Option<Value> {
    match batcher.scope_rules(scope).await {
        Ok(rules) => rules,
        Err(error) => {
            tracing::debug!(%error, scope, "the scope's rules cannot be read");
            None
        }
    }
}
