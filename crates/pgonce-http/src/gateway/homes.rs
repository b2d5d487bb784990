//! Keys that are at home elsewhere: their requests go to the gateway that is home, and to no other.

use std::collections::HashMap;
use std::time::{Duration, SystemTime};

use http::{HeaderMap, HeaderValue, Request, Response};
use hyper::body::Incoming;

use super::body::Body;
use super::config::{RegionsConfig, UpstreamConfig};
use super::headers::{TENANT, strip_hop_by_hop};
use super::regions::{HOP, Regions};
use super::upstream::{Lost, Peer, Upstream};
use crate::problem::Problem;

/// How much longer another region's gateway may take than the service behind it.
const HOP_MAX: Duration = Duration::from_secs(5);

/// The gateways of all regions but this one.
#[derive(Debug)]
pub(super) struct Homes {
    regions: Regions,
    gateways: HashMap<String, Upstream>,
}

/// A request's home, elsewhere.
pub(super) struct Home<'a> {
    gateway: &'a Upstream,
    hop: HeaderValue,
    tenant: HeaderValue,
}

impl Homes {
    pub(super) fn new(config: &RegionsConfig, upstream: &UpstreamConfig) -> Result<Self, String> {
        let mut gateways = HashMap::new();
        for region in config.list.iter().filter(|region| region.name != config.own) {
            let gateway = UpstreamConfig {
                url: region.url.clone(),
                tls: config.tls.clone(),
                timeout: upstream.timeout + HOP_MAX,
                ..upstream.clone()
            };
            gateways.insert(region.name.clone(), Upstream::new(&gateway, true).map_err(|error| error.to_string())?);
        }
        Ok(Self { regions: Regions::new(config).ok_or("the regions' secret cannot be used")?, gateways })
    }

    /// The tenant of a request that another of our gateways has sent here, by its signed word. What it learned
    /// from the client's certificate cannot be seen from here.
    pub(super) fn sent_for(&self, headers: &HeaderMap, scope: &str, key: &str) -> Option<String> {
        let (hop, tenant) = (headers.get(HOP)?, headers.get(TENANT)?.to_str().ok()?);
        self.regions.is_hop(hop, tenant, scope, key, SystemTime::now()).then(|| tenant.to_owned())
    }

    /// Where the request belongs, if not here. One that was sent here goes no further: two gateways that disagree
    /// about a key's home must not send it around, and must not both run it.
    pub(super) fn away(&self, sent: bool, tenant: &str, scope: &str, key: &str) -> Result<Option<Home<'_>>, Problem> {
        let Some(home) = self.regions.home(tenant, scope, key) else { return Ok(None) };
        if sent {
            tracing::error!(home = %home.name, "another gateway takes this one for a key's home: the regions differ");
            return Err(Problem::HomeAway);
        }
        let hop = self.regions.hop(home, tenant, scope, key, SystemTime::now()).ok_or(Problem::Internal)?;
        let gateway = self.gateways.get(&home.name).ok_or(Problem::HomeAway)?;
        let tenant = HeaderValue::try_from(tenant).map_err(|_| Problem::TenantRefused)?;
        Ok(Some(Home { gateway, hop, tenant }))
    }
}

impl Home<'_> {
    /// Sends the request home and passes the answer on. If home is away, nobody else may answer.
    pub(super) async fn forward(self, mut request: Request<Incoming>, peer: &Peer) -> Result<Response<Body>, Problem> {
        self.gateway.address(&mut request, peer)?;
        request.headers_mut().insert(HOP, self.hop);
        request.headers_mut().insert(TENANT, self.tenant);
        let sent = self.gateway.send(request.map(Body::Streaming)).await;
        let mut response = sent.map_err(|lost| match lost {
            Lost::NotSent => Problem::HomeAway,
            Lost::TimedOut | Lost::Broken => Problem::InDoubt,
        })?;
        strip_hop_by_hop(response.headers_mut());
        Ok(response.map(Body::Streaming))
    }
}
