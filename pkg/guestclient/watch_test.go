package guestclient

import (
	"context"
	"errors"
	"io"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
)

const anObservation = `{"version":1,"window":"claude"}` + "\n"

func TestObservationsFromAGuest(t *testing.T) {
	enough := errors.New("enough")
	for name, c := range map[string]struct {
		stream string
		stop   int // after this many observations
		seen   int
		want   string
	}{
		"ends":             {strings.Repeat(anObservation, 2), 0, 2, errEnded.Error()},
		"says nothing":     {"", 0, 0, errEnded.Error()},
		"talks nonsense":   {anObservation + "\x1b]52;c;x\x07\n" + anObservation, 0, 1, "watch the guest: observation: "},
		"has no line ends": {anObservation + strings.Repeat("a", guestproto.MaxObservation+1), 0, 1, "token too long"},
		"is not needed":    {strings.Repeat(anObservation, 5), 3, 3, enough.Error()},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := 0
				err := readObservations(strings.NewReader(c.stream), func(error) {}, func(g guestproto.Observation) error {
					if n++; n == c.stop {
						return enough
					}
					if g.Window != "claude" {
						t.Errorf("observation = %+v, want window %q", g, "claude")
					}
					return nil
				})
				if n != c.seen || err == nil || !strings.Contains(err.Error(), c.want) || strings.ContainsAny(err.Error(), "\x1b\x07") {
					t.Errorf("readObservations of %d observations: error %v, want %d and an error with %q", n, err, c.seen, c.want)
				}
			})
		})
	}
}

// TestAFloodOfObservations checks that a guest that sends without end is read at the host's
// pace.
func TestAFloodOfObservations(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began, n := time.Now(), 0
		done := errors.New("done")
		err := readObservations(strings.NewReader(strings.Repeat(anObservation, 1000)), func(error) {}, func(guestproto.Observation) error {
			if n++; n == 600 {
				return done
			}
			return nil
		})
		if took := time.Since(began); !errors.Is(err, done) || took < 599*observationPace-observationPace {
			t.Errorf("readObservations of %d observations within %s: error %v, want at least %s, %v", n, took, err, 599*observationPace-observationPace, done)
		}
	})
}

// TestASilentGuest checks that a silent stream ends, and that the time that f takes
// does not count as silence.
func TestASilentGuest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, w := io.Pipe()
		ctx, cancel := context.WithCancelCause(t.Context())
		context.AfterFunc(ctx, func() { w.CloseWithError(context.Cause(ctx)) })
		go func() {
			for range 3 {
				if _, err := io.WriteString(w, anObservation); err != nil {
					t.Errorf("write an observation: %v", err)
				}
				time.Sleep(observationSilence / 2)
			}
		}()
		n := 0
		err := readObservations(r, cancel, func(guestproto.Observation) error {
			if n++; n == 2 {
				time.Sleep(2 * observationSilence)
			}
			return nil
		})
		if n != 3 || !errors.Is(err, errSilent) {
			t.Errorf("readObservations of %d observations: error %v, want 3, %v", n, err, errSilent)
		}
	})
}
