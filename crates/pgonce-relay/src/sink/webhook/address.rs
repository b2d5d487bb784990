//! Whom a webhook may be sent to: nobody inside, unless that is allowed. The check is made on the addresses that are
//! connected to, not on a name that may mean something else a moment later.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use url::{Host, Url};

use crate::TargetError;

/// An address in the URL itself is not resolved: it is checked here.
pub(crate) fn check(url: &str, allow_private: bool) -> Result<(), TargetError> {
    let url = Url::parse(url).map_err(|_| TargetError("the URL cannot be read".into()))?;
    let address = match url.host() {
        Some(Host::Ipv4(address)) => Some(IpAddr::V4(address)),
        Some(Host::Ipv6(address)) => Some(IpAddr::V6(address)),
        _ => None,
    };
    if !allow_private && address.is_some_and(|address| !is_public(address)) {
        return Err(TargetError("the address is a private one: say allow_private=true if that is meant".into()));
    }
    Ok(())
}

/// Resolves names, to public addresses only.
#[derive(Debug)]
pub(crate) struct Resolver {
    pub allow_private: bool,
}

impl Resolve for Resolver {
    fn resolve(&self, name: Name) -> Resolving {
        let allow_private = self.allow_private;
        Box::pin(async move {
            let found = tokio::net::lookup_host((name.as_str(), 0)).await?;
            let allowed: Vec<SocketAddr> = found.filter(|found| allow_private || is_public(found.ip())).collect();
            if allowed.is_empty() {
                return Err("the name has no public address (allow_private=true allows private ones)".into());
            }
            Ok(Box::new(allowed.into_iter()) as Addrs)
        })
    }
}

fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => is_public_v4(address),
        IpAddr::V6(address) => is_public_v6(address),
    }
}

fn is_public_v4(address: Ipv4Addr) -> bool {
    let [a, b, c, _] = address.octets();
    !(address.is_private()
        || address.is_loopback()
        || address.is_link_local()
        || address.is_documentation()
        || address.is_multicast()
        || a == 0
        || a >= 240
        || (a == 100 && (64..128).contains(&b))
        || (a == 198 && (18..20).contains(&b))
        || (a == 192 && b == 0 && c == 0))
}

fn is_public_v6(address: Ipv6Addr) -> bool {
    let parts = address.segments();
    // Addresses that stand for one of the fourth version are as public as that one.
    let inner = |high: u16, low: u16| Ipv4Addr::from((u32::from(high) << 16) | u32::from(low));
    match parts {
        [0, 0, 0, 0, 0, 0xffff | 0, high, low] | [0x64, 0xff9b, 0, 0, 0, 0, high, low] | [0x2002, high, low, ..] => {
            is_public_v4(inner(high, low))
        }
        _ => parts[0] & 0xe000 == 0x2000 && !(parts[0] == 0x2001 && (parts[1] == 0xdb8 || parts[1] < 0x200)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_public_addresses() {
        for inside in [
            "127.0.0.1",
            "10.1.2.3",
            "192.168.0.1",
            "172.16.0.1",
            "169.254.169.254",
            "100.64.0.1",
            "0.0.0.0",
            "255.255.255.255",
            "224.0.0.1",
            "198.18.0.1",
            "192.0.0.1",
            "::1",
            "::",
            "fe80::1",
            "fc00::1",
            "::ffff:10.0.0.1",
            "64:ff9b::a00:1",
            "2002:a00:1::1",
            "2001:db8::1",
            "ff02::1",
            "::127.0.0.1",
        ] {
            assert!(!is_public(inside.parse().unwrap()), "{inside}");
        }
        for outside in ["1.1.1.1", "93.184.216.34", "2606:4700::1111", "::ffff:1.1.1.1"] {
            assert!(is_public(outside.parse().unwrap()), "{outside}");
        }
        assert!(check("http://127.0.0.1/", false).is_err());
        assert!(check("http://[::1]:80/", false).is_err());
        assert!(check("http://0x7f000001/", false).is_err());
        assert!(check("http://127.0.0.1/", true).is_ok());
        assert!(check("https://example.com/", false).is_ok());
    }
}
