//! pgonce-testkit
