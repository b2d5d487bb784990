//! Who uses a connection, and when: workers for what waits, and a caller alone for itself.
//!
//! A caller that finds a connection idle and nobody waiting makes its call itself, in its own task: through a worker
//! it would pay for two more changes of task than the call is worth. The call stays the lane's all the same. Where
//! the caller leaves, it goes on without it; and after a while it does so in any case, for a caller may hold its future
//! without polling it, and others may wait for its connection. So nothing is lost, and nobody waits for a caller.

use std::future::poll_fn;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use futures_util::future::BoxFuture;
use tokio::runtime::Handle;
use tokio::sync::oneshot::{self, error::TryRecvError};

use crate::pool::Connection;

use super::Core;
use super::lane::{Job, Lane, Next};

/// A job that can be served.
pub(super) trait Serve: Job + Sized {
    /// The lane that it queues in.
    fn lane(core: &Core) -> &Arc<Lane<Self>>;

    /// Serves a batch, and answers everyone that can be answered; the others are put back. False: the connection is
    /// not to be used again.
    fn serve(core: &Arc<Core>, connection: &Connection, batch: Vec<Self>) -> impl Future<Output = bool> + Send;
}

/// A connection in somebody's hands, for one call.
pub(super) struct Turn<J: Job> {
    connection: Box<Connection>,
    place: Place<J>,
}

/// The connection's place in its lane: where it does not come back, another one is made.
struct Place<J: Job> {
    lane: Arc<Lane<J>>,
    is_back: bool,
}

impl<J: Job> Drop for Place<J> {
    fn drop(&mut self) {
        if !self.is_back {
            self.lane.take_back(None, true);
        }
    }
}

impl<J: Job> Turn<J> {
    pub(super) fn new(lane: Arc<Lane<J>>, connection: Box<Connection>) -> Self {
        Self { connection, place: Place { lane, is_back: false } }
    }
}

impl<J: Serve> Turn<J> {
    async fn serve(self, core: &Arc<Core>, batch: Vec<J>, wakes: bool) {
        let Self { connection, mut place } = self;
        let answered = J::serve(core, &connection, batch).await;
        place.is_back = true;
        place.lane.take_back(answered.then_some(connection), wakes);
    }
}

/// A call that its caller drives.
pub(super) struct Driven(Mutex<Driving>);

#[derive(Default)]
struct Driving {
    /// None: it is over, or somebody else drives it.
    call: Option<BoxFuture<'static, ()>>,
    caller: Option<Waker>,
}

impl std::fmt::Debug for Driven {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Driven")
    }
}

impl Driven {
    fn new(call: BoxFuture<'static, ()>) -> Self {
        Self(Mutex::new(Driving { call: Some(call), caller: None }))
    }

    fn driving(&self) -> MutexGuard<'_, Driving> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ready when there is nothing to drive any more.
    fn poll(&self, context: &mut Context<'_>) -> Poll<()> {
        let mut driving = self.driving();
        let Some(call) = &mut driving.call else { return Poll::Ready(()) };
        if call.as_mut().poll(context).is_ready() {
            driving.call = None;
            return Poll::Ready(());
        }
        match &mut driving.caller {
            Some(caller) => caller.clone_from(context.waker()),
            none => *none = Some(context.waker().clone()),
        }
        Poll::Pending
    }

    /// From now on whoever has it drives it; its caller is told, for it has nothing else to be woken by.
    fn take(&self) -> Option<BoxFuture<'static, ()>> {
        let Driving { call, caller } = std::mem::take(&mut *self.driving());
        if let (Some(_), Some(caller)) = (&call, caller) {
            caller.wake();
        }
        call
    }
}

/// The caller's side of a call that it drives.
struct Driver<J: Serve> {
    core: Arc<Core>,
    driven: Arc<Driven>,
    lane: std::marker::PhantomData<fn() -> J>,
}

impl<J: Serve> Driver<J> {
    fn start(core: &Arc<Core>, turn: Turn<J>, job: J) -> Self {
        let shared = Arc::clone(core);
        let call = Box::pin(async move { turn.serve(&shared, vec![job], true).await });
        let driven = Arc::new(Driven::new(call));
        J::lane(core).drives(&driven);
        Self { core: Arc::clone(core), driven, lane: std::marker::PhantomData }
    }
}

impl<J: Serve> Drop for Driver<J> {
    fn drop(&mut self) {
        J::lane(&self.core).drives_no_more(&self.driven);
        // The caller leaves, or its time is up, in mid-call: what was sent is settled without it.
        if let Some(call) = self.driven.take() {
            self.core.runtime.spawn(call);
        }
    }
}

/// A job that was handed over, and its answer to come.
pub(super) struct Handed<J: Serve, T> {
    driver: Option<Driver<J>>,
    answer: oneshot::Receiver<T>,
}

/// Hands a job over: it is begun at once where nobody waits and a connection is idle, and queued where not. None: too
/// many wait.
pub(super) fn hand_over<J: Serve, T>(core: &Arc<Core>, job: J, answer: oneshot::Receiver<T>) -> Option<Handed<J, T>> {
    let lane = J::lane(core);
    // On another runtime the call could not go on without its caller: its timers end with that runtime.
    let is_at_home = Handle::try_current().is_ok_and(|here| here.id() == core.runtime.id());
    let driver = match is_at_home.then(|| lane.turn()).flatten() {
        Some(turn) => Some(Driver::start(core, turn, job)),
        None => {
            lane.push(job).ok()?;
            None
        }
    };
    Some(Handed { driver, answer })
}

impl<J: Serve, T> Handed<J, T> {
    /// The answer. None: the job was dropped without one, or there was none in time. A call that is driven has a
    /// limit of its own, which is no longer: it needs no second timer.
    pub(super) async fn answer(self, within: Duration) -> Option<T> {
        let Self { driver, mut answer } = self;
        let begun = Instant::now();
        if let Some(driver) = driver {
            // The answer is looked at only afterwards: a receiver that waits would be woken by its own task.
            poll_fn(|context| driver.driven.poll(context)).await;
            match answer.try_recv() {
                Ok(answer) => return Some(answer),
                Err(TryRecvError::Closed) => return None,
                Err(TryRecvError::Empty) => {}
            }
        }
        // Queued, put back, or driven by another.
        tokio::time::timeout_at((begun + within).into(), answer).await.ok()?.ok()
    }
}

/// Does what there is to do in a lane, until it is done. There are as many workers as connections: each does something
/// about one connection at a time, so there is always one for what has to be done.
pub(super) async fn work<J: Serve>(core: Arc<Core>) {
    let lane = J::lane(&core);
    loop {
        match lane.next(core.batch.batch_max).await {
            Next::Serve(turn, batch) => turn.serve(&core, batch, false).await,
            Next::Connect => lane.connect(&core.manager, core.connect_timeout).await,
            Next::End => return,
        }
    }
}

/// After so long a caller is not relied on.
const PATIENCE: Duration = Duration::from_millis(10);

/// Looks after what callers began: what is under way for long goes on in a task of its own, whether its caller looks or not.
pub(super) async fn watch<J: Serve>(lane: Arc<Lane<J>>) {
    while let Some(begun) = lane.driven().await {
        tokio::time::sleep(PATIENCE).await;
        for driven in begun {
            // Most are over by now, and nothing is there to take.
            if let Some(call) = driven.take() {
                lane.drives_no_more(&driven);
                tokio::spawn(call);
            }
        }
    }
}
