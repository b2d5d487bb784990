//! Who imports: named so that the next process on the same machine can tell whether this one is still there.

use std::fs;

/// This process: machine, boot, process id, and when it started.
pub(super) fn this() -> String {
    let pid = std::process::id();
    format!("{}/{pid}/{}", machine(), started(pid).unwrap_or_default())
}

/// Whether a process of that name is known to be gone. One of another machine is not known.
pub(super) fn is_dead(owner: &str) -> bool {
    let mut parts = owner.rsplitn(3, '/');
    let (Some(start), Some(pid), Some(place)) = (parts.next(), parts.next(), parts.next()) else { return false };
    let Ok(pid) = pid.parse() else { return false };
    place == machine() && started(pid).as_deref() != Some(start)
}

fn machine() -> String {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default().trim().to_owned();
    // Names repeat among machines; boots do not.
    let boot = read("/proc/sys/kernel/random/boot_id");
    format!("{}/{}", read("/proc/sys/kernel/hostname"), boot.get(..8).unwrap_or_default())
}

/// When a process started, in the kernel's ticks; None where there is no such process, or it is a zombie.
fn started(pid: u32) -> Option<String> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name, in parentheses, may hold anything.
    let rest = stat.rsplit_once(')')?.1;
    let mut fields = rest.split_whitespace();
    let state = fields.next()?;
    if matches!(state, "Z" | "X") { None } else { fields.nth(18).map(str::to_owned) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_lives_and_another_does_not() {
        assert!(!is_dead(&this()));
        let other = this().rsplit_once('/').map(|(head, _)| format!("{head}/1")).unwrap_or_default();
        assert!(is_dead(&other), "the same id, started at another time");
        assert!(!is_dead("elsewhere/00000000/1/1"));
    }
}
