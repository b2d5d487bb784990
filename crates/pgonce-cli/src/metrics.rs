//! `/metrics` for the verbs that run for long and serve nothing else.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Context as _;
use axum::Router;
use axum::routing::get;
use metrics_exporter_prometheus::PrometheusBuilder;

/// Serves metrics at an address, for as long as the process lives; none given, none served.
pub async fn serve(address: Option<SocketAddr>) -> anyhow::Result<()> {
    let Some(address) = address else { return Ok(()) };
    let handle = PrometheusBuilder::new().install_recorder().context("metrics cannot be recorded")?;
    let listener = tokio::net::TcpListener::bind(address).await.with_context(|| format!("{address} cannot be used"))?;
    let upkeep = handle.clone();
    tokio::spawn(async move {
        loop {
            tokio::time::sleep(Duration::from_secs(5)).await;
            upkeep.run_upkeep();
        }
    });
    let router = Router::new().route("/metrics", get(move || std::future::ready(handle.render())));
    tokio::spawn(async move { axum::serve(listener, router).await });
    Ok(())
}
