//! The file: its hash, what it is packed with, and a window over its unpacked bytes.

use std::fs::File;
use std::io::{self, Read, Seek as _, SeekFrom};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use sha2::{Digest, Sha256};

use crate::Error;

/// A record larger than this is taken for a quote that was never closed.
pub(super) const RECORD_BYTES_MAX: usize = 16 << 20;
const CHUNK_BYTES: usize = 256 << 10;

/// A file to import, read through once already.
#[derive(Debug)]
pub(super) struct Content {
    file: File,
    pub(super) size: u64,
    pub(super) sha256: [u8; 32],
    modified: Option<SystemTime>,
    packing: Packing,
    /// How many bytes of the file were read, for progress.
    pub(super) taken: Arc<AtomicU64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Packing {
    Plain,
    Gzip,
    Zstd,
}

impl Content {
    /// Reads it through, for its hash. Blocks.
    pub(super) fn examine(mut file: File, taken: Arc<AtomicU64>) -> Result<Self, Error> {
        let told = |error: io::Error| Error::Invalid(format!("the file cannot be read: {error}"));
        let metadata = file.metadata().map_err(told)?;
        if metadata.is_dir() {
            return Err(Error::Invalid("that is a directory, not a file".into()));
        }
        file.seek(SeekFrom::Start(0))
            .map_err(|_| Error::Invalid("the file cannot be read twice: give a pipe as standard input, as -".into()))?;
        let mut hash = Sha256::new();
        let mut head = Vec::new();
        let mut chunk = vec![0; CHUNK_BYTES];
        let mut size = 0;
        loop {
            let read = match file.read(&mut chunk) {
                Ok(0) => break,
                Ok(read) => read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(told(error)),
            };
            if head.len() < 4 {
                head.extend_from_slice(&chunk[..read.min(4)]);
            }
            hash.update(&chunk[..read]);
            size += read as u64;
            taken.store(size, Ordering::Relaxed);
        }
        let packing = match head.as_slice() {
            [0x1f, 0x8b, ..] => Packing::Gzip,
            [0x28, 0xb5, 0x2f, 0xfd, ..] => Packing::Zstd,
            _ => Packing::Plain,
        };
        let modified = metadata.modified().ok();
        Ok(Self { file, size, sha256: hash.finalize().into(), modified, packing, taken })
    }

    /// Whether it is still what was hashed, as far as its size and time tell.
    pub(super) fn is_same(&self) -> bool {
        self.file.metadata().is_ok_and(|now| now.len() == self.size && now.modified().ok() == self.modified)
    }

    /// Its unpacked bytes from an offset on: sought where that can be done, read past where it is packed.
    pub(super) fn window(&self, offset: u64) -> io::Result<Window> {
        let mut file = self.file.try_clone()?;
        let start = if self.packing == Packing::Plain { offset } else { 0 };
        file.seek(SeekFrom::Start(start))?;
        self.taken.store(start, Ordering::Relaxed);
        let counted = Counted { file, taken: Arc::clone(&self.taken) };
        let mut reader: Box<dyn Read + Send> = match self.packing {
            Packing::Plain => Box::new(counted),
            Packing::Gzip => {
                Box::new(flate2::read::MultiGzDecoder::new(io::BufReader::with_capacity(CHUNK_BYTES, counted)))
            }
            Packing::Zstd => Box::new(zstd::stream::read::Decoder::new(counted)?),
        };
        if start < offset {
            let passed = io::copy(&mut reader.by_ref().take(offset), &mut io::sink())?;
            if passed < offset {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        Ok(Window { reader, buffer: Vec::new(), start: 0, offset, is_ended: false })
    }
}

/// Counts what is read.
struct Counted {
    file: File,
    taken: Arc<AtomicU64>,
}

impl Read for Counted {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read(buffer)?;
        self.taken.fetch_add(read as u64, Ordering::Relaxed);
        Ok(read)
    }
}

/// A view of the unpacked bytes that always begins at a record.
pub(super) struct Window {
    reader: Box<dyn Read + Send>,
    buffer: Vec<u8>,
    start: usize,
    /// Where the view begins, from the content's beginning.
    pub(super) offset: u64,
    is_ended: bool,
}

impl Window {
    /// What is there.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.buffer[self.start..]
    }

    /// Goes past a record.
    pub(super) fn pass(&mut self, bytes: usize) {
        self.start += bytes;
        self.offset += bytes as u64;
    }

    /// Reads more behind what is there; false at the end. A record that does not fit is an error.
    pub(super) fn more(&mut self) -> io::Result<bool> {
        if self.is_ended {
            return Ok(false);
        }
        if self.start > 0 {
            self.buffer.drain(..self.start);
            self.start = 0;
        }
        let filled = self.buffer.len();
        if filled > RECORD_BYTES_MAX {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "a record of more than 16 MiB: a quote that is not closed?",
            ));
        }
        self.buffer.resize(filled + CHUNK_BYTES, 0);
        let read = loop {
            match self.reader.read(&mut self.buffer[filled..]) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                read => break read,
            }
        };
        self.buffer.truncate(filled + read.as_ref().map_or(0, |read| *read));
        let read = read?;
        self.is_ended = read == 0;
        Ok(read > 0)
    }
}

impl std::fmt::Debug for Window {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Window").field("offset", &self.offset).finish_non_exhaustive()
    }
}
