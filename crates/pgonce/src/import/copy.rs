//! Rows as COPY reads them: text, tabs between fields, `\N` for null.

use super::records::Bad;

/// A line that is being written.
#[derive(Debug)]
pub(super) struct Line<'a> {
    data: &'a mut Vec<u8>,
    fields: usize,
    /// Columns that must not be null: the natural key's.
    keys: &'a [String],
}

impl<'a> Line<'a> {
    pub(super) fn begin(data: &'a mut Vec<u8>, keys: &'a [String]) -> Self {
        Self { data, fields: 0, keys }
    }

    /// Adds a field.
    pub(super) fn field(&mut self, name: &str, value: Option<&str>) -> Result<(), Bad> {
        if self.fields > 0 {
            self.data.push(b'\t');
        }
        self.fields += 1;
        let Some(value) = value else {
            if self.keys.iter().any(|key| key == name) {
                return Err(Bad::new("23502", format!("the natural key is null: {name}")));
            }
            self.data.extend_from_slice(b"\\N");
            return Ok(());
        };
        let bytes = value.as_bytes();
        let mut written = 0;
        for (place, byte) in bytes.iter().enumerate() {
            let escape: &[u8] = match byte {
                b'\\' => b"\\\\",
                b'\t' => b"\\t",
                b'\n' => b"\\n",
                b'\r' => b"\\r",
                0 => return Err(Bad::new("22021", "a zero byte, which no text in PostgreSQL holds")),
                _ => continue,
            };
            self.data.extend_from_slice(&bytes[written..place]);
            self.data.extend_from_slice(escape);
            written = place + 1;
        }
        self.data.extend_from_slice(&bytes[written..]);
        Ok(())
    }

    /// Ends it.
    pub(super) fn end(self) {
        self.data.push(b'\n');
    }
}
