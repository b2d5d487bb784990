-- What a direct caller must know of a scope: which parts of an answer are kept, for how long, and whether keys
-- have a format (then it uses the functions). $1 tenant, $2 scope.
SELECT s.response, (extract(epoch FROM s.retention) * 1000)::bigint, (extract(epoch FROM s.tombstone) * 1000)::bigint,
       s.key_pattern IS NOT NULL
FROM once.policy($1, $2) s
