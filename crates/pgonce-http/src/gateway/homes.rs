//! Keys that are at home elsewhere: their requests go to the gateway that is home, and to no other.

use std::collections::HashMap;
use std::time::{Duration, SystemTime};

use http::{HeaderMap, HeaderValue, Request, Response};
use hyper::body::Incoming;

use super::Named;
use super::body::Body;
use super::config::{RegionsConfig, ResponseTimes, UpstreamConfig};
use super::headers::{TENANT, strip_hop_by_hop};
use super::regions::{HOP, Regions};
use super::upstream::{Lost, Peer, Upstream, streaming};
use crate::key::parse_key;
use crate::policy::Policy;
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

fn text(value: &HeaderValue) -> Option<String> {
    std::str::from_utf8(value.as_bytes()).ok().map(str::to_owned)
}

impl Homes {
    pub(super) fn new(
        config: &RegionsConfig,
        upstream: &UpstreamConfig,
        trust_forwarded: bool,
    ) -> Result<Self, String> {
        let mut gateways = HashMap::new();
        for region in config.list.iter().filter(|region| region.name != config.own) {
            let gateway = UpstreamConfig {
                url: region.url.clone(),
                tls: config.tls.clone(),
                timeout: upstream.timeout + HOP_MAX,
                ..upstream.clone()
            };
            // Home believes what we say of the client: no more of it may be the client's word than here.
            let gateway = Upstream::new(&gateway, trust_forwarded).map_err(|error| error.to_string())?;
            gateways.insert(region.name.clone(), gateway);
        }
        Ok(Self { regions: Regions::new(config).ok_or("the regions' secret cannot be used")?, gateways })
    }

    /// The tenant of a request that another gateway has sent here: it has verified what the client showed, which
    /// this one may not even see (a certificate, say). What anybody else says under these names is dropped.
    pub(super) fn sent(&self, headers: &mut HeaderMap, policy: &Policy) -> Option<String> {
        let hop = headers.remove(HOP)?;
        let tenant = headers.remove(TENANT).map_or(Some(String::new()), |tenant| text(&tenant))?;
        let key = parse_key(headers, &policy.header, policy.syntax).ok()??;
        self.regions.is_hop(&hop, &tenant, &policy.scope, &key, SystemTime::now()).then_some(tenant)
    }

    /// Where the request belongs, if not here. One that was forwarded here goes no further: two gateways that
    /// disagree about a key's home must not send it around, and must not both run it.
    pub(super) fn away(&self, named: &Named, scope: &str) -> Result<Option<Home<'_>>, Problem> {
        let Named { tenant, key, forwarded } = named;
        let Some(home) = self.regions.home(tenant, scope, key) else { return Ok(None) };
        if *forwarded {
            tracing::error!(home = %home.name, "another gateway takes this one for a key's home: the regions differ");
            return Err(Problem::HomeAway);
        }
        let hop = self.regions.hop(home, tenant, scope, key, SystemTime::now()).ok_or(Problem::Internal)?;
        let gateway = self.gateways.get(&home.name).ok_or(Problem::HomeAway)?;
        let tenant = HeaderValue::from_bytes(tenant.as_bytes()).map_err(|_| Problem::Internal)?;
        Ok(Some(Home { gateway, hop, tenant }))
    }
}

impl Home<'_> {
    /// Sends the request home and passes the answer on. If home is away, nobody else may answer.
    pub(super) async fn forward(
        self,
        request: Request<Incoming>,
        peer: &Peer,
        times: ResponseTimes,
    ) -> Result<Response<Body>, Problem> {
        let mut request = streaming(request);
        self.gateway.address(&mut request, peer)?;
        request.headers_mut().insert(HOP, self.hop);
        request.headers_mut().insert(TENANT, self.tenant);
        let sent = self.gateway.send(request).await;
        let mut response = sent.map_err(|lost| match lost {
            Lost::NotSent => Problem::HomeAway,
            Lost::TimedOut | Lost::Broken => Problem::InDoubt,
        })?;
        strip_hop_by_hop(response.headers_mut());
        Ok(response.map(|body| Body::Streaming(body.within(times))))
    }
}
