-- What operators ask about imports.
CREATE OR REPLACE VIEW once.imports AS
SELECT j.id, j.tenant, j.name, j.target, j.state::text AS state, j.run, j.next_row - 1 AS rows, j.applied, j.skipped, j.failed,
       j.size, j.next_offset, j.actor, j.owner, j.leased_until,
       j.state = 'running' AND j.leased_until <= once.clock() AS left_behind, j.last_error, j.started_at, j.updated_at,
       j.ended_at, j.options, encode(j.content, 'hex') AS sha256, j.claim_id, j.header
FROM once.import_job j;

CREATE OR REPLACE VIEW once.import_batches AS
SELECT b.job, b.first_row, b.last_row, b.applied, b.failed, b.existing, b.unchanged, b.dropped, b.at FROM once.import_batch b;

CREATE OR REPLACE VIEW once.import_errors AS
SELECT r.job, r.row, r.line, r.code, r.message, r.input FROM once.import_row r;
