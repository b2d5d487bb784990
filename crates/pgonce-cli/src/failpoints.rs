//! For tests: `PGONCE_KILL_AT=POINT` and `PGONCE_STOP_AT=POINT` send this process SIGKILL or SIGSTOP when it first
//! comes by.

use std::sync::atomic::{AtomicBool, Ordering};

/// Arms what the environment asks for.
pub fn arm() {
    for (variable, signal) in [("PGONCE_KILL_AT", "-KILL"), ("PGONCE_STOP_AT", "-STOP")] {
        if let Ok(point) = std::env::var(variable) {
            let fired = AtomicBool::new(false);
            let armed = fail::cfg_callback(point, move || {
                if !fired.swap(true, Ordering::SeqCst) {
                    hit(signal);
                }
            });
            if let Err(error) = armed {
                crate::output::say(&format!("{variable}: {error}"));
            }
        }
    }
}

fn hit(signal: &str) {
    // To this very thread, which takes it before it goes on. Sent to the process, it may be another one's to take,
    // and while that one waits for a processor, this one runs on.
    let own = std::fs::read_link("/proc/thread-self").ok();
    let own = own.as_deref().and_then(std::path::Path::file_name).map(|name| name.to_string_lossy().into_owned());
    let own = own.unwrap_or_else(|| std::process::id().to_string());
    let sent = std::process::Command::new("kill").args([signal, &own]).status();
    if signal == "-KILL" && sent.is_ok() {
        // The signal is on its way; nothing may happen after this point.
        loop {
            std::thread::park();
        }
    }
}
