-- Workers call once.take_unsorted from here on. It needs what choose_jobs looked at, too: another result, which CREATE OR
-- REPLACE cannot give it.
DROP FUNCTION IF EXISTS once.choose_jobs(once.queue, text, int);
