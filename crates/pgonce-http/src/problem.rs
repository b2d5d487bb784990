//! What a refused request is told.

/// Which status says what.
#[derive(Debug, Clone, Default)]
pub struct StatusMap;
