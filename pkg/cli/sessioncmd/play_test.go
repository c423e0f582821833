package sessioncmd

import (
	"bytes"
	"context"
	"errors"
	"iter"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/recording"
)

func recorded(events ...recording.Event) iter.Seq2[recording.Event, error] {
	return func(yield func(recording.Event, error) bool) {
		for _, e := range events {
			if !yield(e, nil) {
				return
			}
		}
	}
}

func TestPlayer(t *testing.T) {
	const s = time.Second
	events := recorded(recording.Event{At: 0, Kind: recording.Output, Data: "a"}, recording.Event{At: 1 * s, Kind: recording.Output, Data: "b"},
		recording.Event{At: 1 * s, Kind: recording.Resize, Data: "10x10"}, recording.Event{At: 100 * s, Kind: recording.Output, Data: "c"})
	type press struct {
		after time.Duration
		key   byte
	}
	for _, c := range []struct {
		name  string
		p     player
		keys  []press
		want  string
		takes time.Duration
	}{
		{"with the pause", player{speed: 1, idle: time.Hour}, nil, "abc", 100 * s},
		{"without the pause", player{speed: 1, idle: 2 * s}, nil, "abc", 3 * s},
		{"twice as fast", player{speed: 2, idle: 2 * s}, nil, "abc", 3 * s / 2},
		{"from within", player{speed: 1, idle: time.Hour, at: 99 * s}, nil, "abc", s},
		{"paused for a minute", player{speed: 1, idle: 2 * s}, []press{{s / 2, ' '}, {time.Minute, ' '}}, "abc", 3*s + time.Minute},
		{"step by step", player{speed: 1, idle: 2 * s}, []press{{s / 2, ' '}, {s, '.'}, {s, '.'}}, "abc", s/2 + 2*s},
		{"faster after a while", player{speed: 1, idle: 2 * s}, []press{{2 * s, '+'}}, "abc", 2*s + s/2},
		{"slower after a while", player{speed: 1, idle: 2 * s}, []press{{2 * s, '-'}}, "abc", 2*s + 2*s},
		{"ended", player{speed: 1, idle: time.Hour}, []press{{10 * s, 'q'}}, "ab", 10 * s},
		{"interrupted", player{speed: 1, idle: time.Hour}, []press{{10 * s, 3}}, "ab", 10 * s},
		{"other keys", player{speed: 1, idle: 2 * s}, []press{{s / 4, '.'}, {s / 4, 'x'}}, "abc", 3 * s},
	} {
		synctest.Test(t, func(t *testing.T) {
			keys := make(chan byte)
			c.p.keys = keys
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			go func() {
				for _, k := range c.keys {
					time.Sleep(k.after) // of the bubble
					select {
					case keys <- k.key:
					case <-ctx.Done():
						return
					}
				}
			}()
			began := time.Now()
			var screen bytes.Buffer
			if err := c.p.play(ctx, &screen, events); err != nil {
				t.Fatal(err)
			}
			if took := time.Since(began); screen.String() != c.want || took != c.takes {
				t.Errorf("%s: shows %q in %v, want %q in %v", c.name, screen.String(), took, c.want, c.takes)
			}
		})
	}
}

func TestPlayerEnds(t *testing.T) {
	broken := errors.New("broken")
	var screen bytes.Buffer
	err := (&player{speed: 1}).play(t.Context(), &screen, func(yield func(recording.Event, error) bool) { yield(recording.Event{}, broken) })
	if !errors.Is(err, broken) {
		t.Errorf("play = %v, want the error of the recording", err)
	}
	later := recorded(recording.Event{At: time.Hour, Kind: recording.Output, Data: "x"})
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := (&player{speed: 1, idle: time.Hour}).play(ctx, &screen, later); !errors.Is(err, context.Canceled) {
		t.Errorf("play = %v, want context.Canceled", err)
	}
	keys := make(chan byte)
	close(keys)
	if err := (&player{speed: 1, idle: time.Hour, keys: keys}).play(t.Context(), &screen, later); err != nil || screen.Len() > 0 {
		t.Errorf("play without a terminal = %v, shows %q, want it to end", err, screen.String())
	}
}
