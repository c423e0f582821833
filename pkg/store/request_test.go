package store_test

import (
	"encoding/json"
	"fmt"
	"path/filepath"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

// Each actor has its own keys, the first request with a key counts, and the keys are
// limited in age and number.
func TestRequests(t *testing.T) {
	path := filepath.Join(t.TempDir(), "store.db")
	s := reopen(t, path)
	reserve := func(actor, key, subject string) string {
		t.Helper()
		kept, err := s.Reserve(t.Context(), store.Request{Actor: actor, Key: key, Digest: "d" + subject, Subject: subject, Notes: json.RawMessage(`["n"]`)})
		if err != nil {
			t.Fatal(err)
		}
		return kept.Subject
	}
	has := func(actor, key, subject string) {
		t.Helper()
		r, found, err := s.Request(t.Context(), actor, key)
		if err != nil || found != (subject != "") || r.Subject != subject || found && (r.Digest != "d"+subject || string(r.Notes) != `["n"]`) {
			t.Errorf("Request(%s, %s) = %+v, %t, %v, want subject %q", actor, key, r, found, err, subject)
		}
	}
	has("a", "k", "")
	for _, c := range []struct{ actor, key, subject, want string }{
		{"a", "k", "1", "1"}, {"a", "k", "2", "1"}, {"b", "k", "3", "3"}, {"a", "l", "4", "4"},
	} {
		if got := reserve(c.actor, c.key, c.subject); got != c.want {
			t.Errorf("reserve(%s, %s, %s) = %q, want %q", c.actor, c.key, c.subject, got, c.want)
		}
	}
	s = reopen(t, path)
	has("a", "k", "1")
	has("b", "k", "3")

	old := time.Now().Add(-25 * time.Hour).UnixMilli()
	raw(t, path, fmt.Sprintf(`UPDATE requests SET at = %d WHERE actor = 'a' AND key = 'k'`, old))
	has("a", "k", "")
	if got := reserve("a", "k", "5"); got != "5" {
		t.Errorf("reserve(a, k, 5) after a day = %q, want \"5\"", got)
	}
	raw(t, path, fmt.Sprintf(`WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 10000)
		INSERT INTO requests (actor, key, digest, subject, notes, at) SELECT 'a', 'many' || i, 'd' || i, i, '["n"]', %d FROM n`, time.Now().UnixMilli()))
	reserve("a", "last", "6")
	has("a", "k", "")
	has("a", "many1", "")
	has("a", "many2", "2")
	has("a", "last", "6")
	has("b", "k", "3")
}
