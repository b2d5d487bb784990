-- Limits of a provider's name.
CREATE OR REPLACE FUNCTION once.check_provider_name(p_provider text) RETURNS void LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF p_provider IS NULL OR octet_length(p_provider) NOT BETWEEN 1 AND 128 OR p_provider ~ '[[:cntrl:]]' THEN
        RAISE EXCEPTION 'provider is missing, longer than 128 bytes, or has control characters'
            USING ERRCODE = 'P4000', HINT = 'A provider names whom calls go to, for example stripe.';
    END IF;
END $$;
