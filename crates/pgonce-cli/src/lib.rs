//! pgonce-cli
