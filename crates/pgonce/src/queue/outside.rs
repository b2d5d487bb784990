//! Handlers without a transaction: their jobs are finished afterwards, several at a time.

use std::sync::Arc;

use futures_util::future::join_all;
use tokio::sync::mpsc;
use tokio_postgres::types::{ToSql, Type};
use uuid::Uuid;

use super::desk::{Desk, Standing, Ticket};
use super::{Job, Worker};
use crate::error::Failure;
use crate::sql::Call;
use crate::{Error, observe};

/// Jobs that are finished by one call.
const BATCH_MAX: usize = 1000;

/// So many jobs of one take are finished by a call of their own: `once.finish_batch` does that in one walk.
const ONE_TAKE_MIN: usize = 100;

type Done = (Arc<Job>, Option<serde_json::Value>);

impl Worker<'_> {
    /// Works until no more jobs are to be begun, and everything is finished.
    pub(super) async fn outside<F, R>(&self, desk: &Desk, handler: &F)
    where
        F: Fn(Arc<Job>) -> R,
        R: Future<Output = Result<Option<serde_json::Value>, Failure>>,
    {
        let (sender, receiver) = mpsc::channel(BATCH_MAX * 2);
        let lanes: Vec<_> = (0..self.at_once).map(|_| self.outside_lane(desk, handler, sender.clone())).collect();
        drop(sender); // the finishing ends with the last lane's, and what is in the channel
        tokio::join!(join_all(lanes), self.finish_all(desk, receiver));
    }

    async fn outside_lane<F, R>(&self, desk: &Desk, handler: &F, done: mpsc::Sender<Done>)
    where
        F: Fn(Arc<Job>) -> R,
        R: Future<Output = Result<Option<serde_json::Value>, Failure>>,
    {
        while let Some(ticket) = desk.next().await {
            let job = Arc::clone(&ticket.job);
            let ran = match ticket.standing() {
                Standing::Held => tokio::select! {
                    biased; // a handler that is quick needs nobody to listen
                    ran = handler(Arc::clone(&job)) => Ok(ran),
                    standing = ticket.dropped() => Err(standing),
                },
                lost => Err(lost),
            };
            match ran {
                Ok(Ok(result)) => {
                    let _ = done.send((job, result)).await;
                }
                Ok(Err(failure)) => self.fail_outside(desk, &ticket, &failure).await,
                Err(standing) => self.drop_job(desk, &ticket, standing).await,
            }
        }
    }

    async fn fail_outside(&self, desk: &Desk, ticket: &Ticket, failure: &Failure) {
        self.fail(&ticket.job, failure).await;
        desk.let_go(&[Arc::clone(&ticket.job)]);
    }

    async fn finish_all(&self, desk: &Desk, mut receiver: mpsc::Receiver<Done>) {
        let mut batch = Vec::with_capacity(BATCH_MAX);
        while receiver.recv_many(&mut batch, BATCH_MAX).await > 0 {
            // While one is on its way, the next gathers.
            batch.sort_unstable_by_key(|(job, _)| (job.claim_id, job.id));
            let takes = batch.chunk_by(|(one, _), (next, _)| one.claim_id == next.claim_id);
            let (large, small): (Vec<_>, Vec<_>) = takes.partition(|take| take.len() >= ONE_TAKE_MIN);
            for take in large {
                self.finish_some(&take.iter().collect::<Vec<_>>()).await;
            }
            let mut others: Vec<&Done> = small.into_iter().flatten().collect();
            others.sort_unstable_by_key(|(job, _)| job.id);
            self.finish_some(&others).await;
            desk.let_go(batch.iter().map(|(job, _)| job));
            batch.clear();
        }
    }

    /// All at once, in the order of ids; where one is lost, each by itself.
    async fn finish_some(&self, batch: &[&Done]) {
        if batch.is_empty() {
            return;
        }
        match self.finish(batch).await {
            Ok(()) => observe::worked(&self.queue.name, "finished", batch.len()),
            Err(error) if batch.len() == 1 => {
                tracing::warn!(queue = %self.queue.name, %error, "a job whose effect is there could not be finished; it is done again when its lease is over");
                observe::worked(
                    &self.queue.name,
                    if matches!(error, Error::JobLost) { "lost" } else { "unrecorded" },
                    1,
                );
            }
            Err(_) => {
                for one in batch {
                    Box::pin(self.finish_some(&[one])).await;
                }
            }
        }
    }

    async fn finish(&self, batch: &[&Done]) -> Result<(), Error> {
        let (ids, claims): (Vec<i64>, Vec<Uuid>) = batch.iter().map(|(job, _)| (job.id, job.claim_id)).unzip();
        let results: Option<Vec<&Option<serde_json::Value>>> =
            batch.iter().any(|(_, result)| result.is_some()).then(|| batch.iter().map(|(_, result)| result).collect());
        let parameters: [(&(dyn ToSql + Sync), Type); 3] =
            [(&ids, Type::INT8_ARRAY), (&claims, Type::UUID_ARRAY), (&results, Type::JSONB_ARRAY)];
        self.once().connection().await?.call(Call::FinishBatch, &parameters).await?;
        Ok(())
    }
}
