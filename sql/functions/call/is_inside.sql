-- Whether a path stays under the base that it is put behind: it cannot name another host, nor climb out, whoever reads it.
CREATE OR REPLACE FUNCTION once.is_inside(p_path text) RETURNS boolean LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    RETURN p_path COLLATE "C" ~ '^/[!-~]*$' AND p_path !~ '[\\#]' AND p_path !~ '^//' AND octet_length(p_path) <= 4096
       -- Dots, also written in percent; and slashes that are written so are read as such by some.
       AND split_part(p_path, '?', 1) !~* '(/|%2f|%5c)(\.|%2e){1,2}(/|%2f|%5c|;|$)';
END $$;
