//! Running contenders side by side: interleaved rounds, medians and spread, ratios first.

use std::time::{Duration, Instant};

use anyhow::Result;

/// Runs `workers` tasks for `window` and returns calls per second. Each worker is made by `make`, before
/// the clock starts.
pub async fn rate<M, W, F>(workers: usize, window: Duration, make: M) -> Result<f64>
where
    M: AsyncFn(usize) -> Result<W>,
    W: Fn() -> F + Send + 'static,
    F: Future<Output = Result<()>> + Send,
{
    let mut made = Vec::new();
    for index in 0..workers {
        made.push(make(index).await?);
    }
    let started = Instant::now();
    let ends = started + window;
    let mut tasks = tokio::task::JoinSet::new();
    for worker in made {
        tasks.spawn(async move {
            let mut calls = 0_u64;
            while Instant::now() < ends {
                worker().await?;
                calls += 1;
            }
            anyhow::Ok(calls)
        });
    }
    let mut calls = 0;
    while let Some(done) = tasks.join_next().await {
        calls += done??;
    }
    Ok(calls as f64 / started.elapsed().as_secs_f64())
}

/// One contender's rates over the rounds.
#[derive(Debug)]
pub struct Series {
    pub name: String,
    pub rates: Vec<f64>,
}

impl Series {
    pub fn median(&self) -> f64 {
        let mut sorted = self.rates.clone();
        sorted.sort_by(f64::total_cmp);
        sorted.get(sorted.len() / 2).copied().unwrap_or_default()
    }
}

/// Prints each contender against the first: the ratio is the median of the rounds' own ratios, because
/// contenders of one round saw the same machine.
pub fn report(title: &str, series: &[Series]) {
    let Some(base) = series.first() else { return };
    eprintln!("\n{title}");
    for one in series {
        let mut ratios: Vec<f64> = one.rates.iter().zip(&base.rates).map(|(rate, base)| rate / base).collect();
        ratios.sort_by(f64::total_cmp);
        let (low, high) = (ratios.first().copied().unwrap_or_default(), ratios.last().copied().unwrap_or_default());
        let ratio = ratios.get(ratios.len() / 2).copied().unwrap_or_default();
        emit(&format!("{ratio:5.2} ({low:.2}-{high:.2})  {:>9.0}/s  {}", one.median(), one.name));
    }
}

/// Figures go to stdout, talk to stderr.
#[allow(clippy::print_stdout)]
pub fn emit(line: &str) {
    println!("{line}");
}
