//! Who decides, and why: for the audit trail.

use clap::Args;

use crate::WrongUse;

/// Who does it, and why.
#[derive(Debug, Args)]
pub struct Decision {
    /// Why: goes into the audit trail
    #[arg(long)]
    pub reason: String,
    /// Who decides; $USER if it is not given
    #[arg(long, env = "USER", hide_env = true)]
    pub actor: Option<String>,
}

impl Decision {
    /// Both, if they say something. In a container nobody may be $USER: then there is no guess, and the trail has no empty name.
    pub fn actor(&self) -> Result<&str, WrongUse> {
        let actor = self.actor.as_deref().map(str::trim).filter(|actor| !actor.is_empty()).ok_or_else(|| {
            WrongUse("nobody knows who decides: USER is not set here; give --actor NAME, for the audit trail".into())
        })?;
        if self.reason.trim().is_empty() {
            return Err(WrongUse("a decision needs its reason: --reason is empty".into()));
        }
        Ok(actor)
    }
}
