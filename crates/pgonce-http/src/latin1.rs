//! Header values as text and back: a value is bytes, and each byte is the character of the same number.

/// The text of any bytes.
pub(crate) fn decode(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| char::from(*byte)).collect()
}

/// The bytes of a text; none where a character has no byte of its number.
pub(crate) fn encode(text: &str) -> Option<Vec<u8>> {
    text.chars().map(|character| u8::try_from(u32::from(character)).ok()).collect()
}
