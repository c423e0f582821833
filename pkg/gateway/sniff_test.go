package gateway

import "testing"

// TestSniff checks that on a port that a rule opened, no input reaches a TLS server
// past the check of the name. OpenSSL and Go skip an alert before the hello.
func TestSniff(t *testing.T) {
	for said, want := range map[string]protocol{
		"":                                 undecided,
		"\x16":                             speaksTLS,
		"\x15":                             undecided,
		"\x15\x03\x01\x00\x02\x01\x00\x16": speaksTLS, // a warning, then a hello
		"\x14\x03\x03\x00\x01\x01":         speaksTLS,
		"\x17\x03\x03\x00\x01x":            speaksTLS,
		"\x18\x03\x03":                     speaksTLS,
		"\x15\x04":                         speaksOther,
		"\x80":                             undecided,
		"\x80\x2e\x01\x03\x01":             speaksTLS, // SSL 2
		"\x82\x00\x01":                     speaksTLS,
		"\x80\x2e\x02\n":                   speaksOther,
		"GET / HTTP/1.1\r\n":               speaksHTTP,
		"\r\nfoo / hTTp/1.0":               speaksHTTP,
		"GET / HT":                         undecided,
		"GET /\r\n":                        speaksHTTP,  // HTTP/0.9
		"get key\r\n":                      speaksOther, // memcached
		"hello\n":                          speaksOther,
		"\x00\x00\x00\x08\x04\xd2\x16\x2f": speaksOther, // PostgreSQL asks for TLS
	} {
		if got := sniff([]byte(said)); got != want {
			t.Errorf("sniff(%q) = %v, want %v", said, got, want)
		}
	}
}
