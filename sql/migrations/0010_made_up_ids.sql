-- A message id that was made up when the message was emitted cannot be said again: there is nothing for a unique index to
-- guard, and its entry, at a random place, cost a quarter of the insert. Ids that were given, or derived from an intent, are
-- guarded as before.

ALTER TABLE once.outbox ADD COLUMN made_up boolean;  -- NULL: the id was given or derived
ALTER TABLE once.outbox DROP CONSTRAINT outbox_message;
CREATE UNIQUE INDEX outbox_message ON once.outbox (message_id, segment) WHERE made_up IS NULL;
