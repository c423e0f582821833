package recording

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/secret"
)

const (
	subject   = "0123456789ab"
	theSecret = "hunter2-hunter2"
)

func newStore(t testing.TB) (Store, *Recorder) {
	t.Helper()
	s := Store{Dir: t.TempDir()}
	return s, &Recorder{Dir: s.Subject(subject), Limit: 64 << 20, Redact: secret.NewRedactor(secret.NewValue(theSecret))}
}

// played returns what a recording shows, and checks that each of its parts plays alone.
func played(t testing.TB, r Recording) string {
	t.Helper()
	var out bytes.Buffer
	if err := r.WriteCast(t.Context(), &out); err != nil {
		t.Fatal(err)
	}
	_, _, events, err := ReadCast(bytes.NewReader(out.Bytes()))
	if err != nil {
		t.Fatalf("read %s: %v", out.String(), err)
	}
	var shown strings.Builder
	last := time.Duration(0)
	for e, err := range events {
		if err != nil {
			t.Fatal(err)
		}
		if e.At < last {
			t.Errorf("event at %v follows one at %v", e.At, last)
		}
		if last = e.At; e.Kind == Output {
			shown.WriteString(e.Data)
		}
	}
	for _, p := range r.parts {
		content, err := os.ReadFile(p.cast())
		if err != nil {
			t.Fatal(err)
		}
		for i, line := range strings.Split(strings.TrimSuffix(string(content), "\n"), "\n") {
			var v any
			if err := json.Unmarshal([]byte(line), &v); err != nil {
				t.Errorf("line %d of %s = %q: %v", i, p.cast(), line, err)
			}
		}
	}
	return shown.String()
}

func one(t testing.TB, s Store) Recording {
	t.Helper()
	all, err := s.List("")
	if err != nil || len(all) != 1 {
		t.Fatalf("List = %+v, %v, want one recording", all, err)
	}
	return all[0]
}

// contents returns all bytes of all files.
func contents(t testing.TB, s Store) map[string]string {
	t.Helper()
	all := map[string]string{}
	err := filepath.WalkDir(s.Dir, func(path string, e os.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		st, err := e.Info()
		if err != nil {
			return err
		}
		if st.Mode() != 0o600 {
			t.Errorf("mode of %s = %v, want -rw-------", path, st.Mode())
		}
		b, err := os.ReadFile(path)
		all[path] = string(b)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}
