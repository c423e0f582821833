//go:build e2e

package e2e

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// foundLines is what recordings search prints.
type foundLines struct {
	Matches []struct{ Recording, Title, Line string }
}

func searchRecordings(b *box, text string) (found foundLines, err error) {
	err = json.Unmarshal([]byte(b.Asz("recordings", "search", "--json", text)), &found)
	return found, err
}

// recordWindows checks that what the guest's windows show is recorded, without the secret that one of them prints.
func recordWindows(t *testing.T, b *box, name, sentinel string) {
	const window = "agent:scratch"
	b.MustIn(name, `tmux send-keys -t `+window+` 'echo recorded-$((40+2)); printf "secret: %s\n" "$SENTINEL"' Enter`)
	var found foundLines
	testenv.WaitFor(t, "the window's output in a recording", func() (done bool) {
		var err error
		if found, err = searchRecordings(b, "recorded-42"); err != nil {
			t.Fatal(err)
		}
		return len(found.Matches) > 0
	})
	m := found.Matches[0]
	if m.Title != "scratch" || m.Line != "recorded-42" {
		t.Errorf("match = %+v, want the line in the window scratch", m)
	}
	testenv.WaitFor(t, "the end of the output in the recording", func() bool {
		return strings.Contains(b.Asz("recordings", "export", "--format", "text", m.Recording), "secret: [redacted]")
	})
	if cast := b.Asz("recordings", "export", m.Recording); !strings.HasPrefix(cast, `{"version":2,`) || strings.Contains(cast, sentinel) {
		t.Errorf("recording begins with %.100q, want an asciicast without the secret", cast)
	}
	titles := b.Asz("recordings", "list", name)
	for _, title := range []string{"vim", "server", "claude", "git", "scratch"} {
		if !strings.Contains(titles, title) {
			t.Errorf("recordings = %s, want one of the window %s", titles, title)
		}
	}
}

// recordingsAfterDestroy checks that recordings outlive their session.
func recordingsAfterDestroy(t *testing.T, b *box) {
	if found, err := searchRecordings(b, "recorded-42"); err != nil || len(found.Matches) == 0 {
		t.Errorf("matches after the session's end = %+v, %v, want some", found, err)
	}
}
