package fleet

// Digest is digest, for tests.
var Digest = digest
