package sessioncmd

import (
	"context"
	"io"
	"iter"
	"os"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/app"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/complete"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/measure"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/recording"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/termtext"
)

type recordingsPlayOptions struct {
	speed    float64
	idle, at string
}

func newRecordingsPlayCmd(a *app.App) *cobra.Command {
	o := recordingsPlayOptions{speed: 1, idle: "2s", at: "0s"}
	cmd := &cobra.Command{
		Use: "play RECORDING", Short: "Play a recording in this terminal",
		Long: `Play a recording in this terminal, which should be as large as the recorded one.
Control sequences are filtered, as when you attach.

Keys: space pauses and continues, . shows the next change while paused, + and - change
the speed, q ends.`,
		Example: `  agent-sessionizer recordings play 3f2a9c1b7d4e-2
  agent-sessionizer recordings play 3f2a9c1b7d4e-2 --at 10m --speed 4`,
		Args: app.Usage(cobra.ExactArgs(1)), ValidArgsFunction: complete.Args(recordingIDs(a)),
		RunE: func(cmd *cobra.Command, args []string) error { return runRecordingsPlay(cmd.Context(), a, o, args[0]) },
	}
	cmd.Flags().Float64Var(&o.speed, "speed", o.speed, "playback speed `FACTOR`, 0.1 to 1000")
	cmd.Flags().StringVar(&o.idle, "idle", o.idle, "shorten pauses to `DURATION`")
	cmd.Flags().StringVar(&o.at, "at", o.at, "`DURATION` from the start of the recording at which to begin")
	return cmd
}

func runRecordingsPlay(ctx context.Context, a *app.App, o recordingsPlayOptions, id string) error {
	p := player{speed: o.speed}
	if o.speed < minSpeed || o.speed > maxSpeed {
		return fail.New(fail.Usage, "--speed must be 0.1 to 1000, got %v", o.speed).WithHint("agent-sessionizer recordings play %s --speed 2", short(id))
	}
	for _, d := range []struct {
		name, text string
		to         *time.Duration
	}{{"--idle", o.idle, &p.idle}, {"--at", o.at, &p.at}} {
		parsed, err := time.ParseDuration(d.text) // milliseconds, which measure.ParseDuration does not read
		if err != nil {
			days, derr := measure.ParseDuration(d.text)
			parsed, err = time.Duration(days), derr
		}
		if err != nil || parsed < 0 {
			return fail.New(fail.Usage, "%s must be a duration like 500ms, 2s or 1h30m, got %q", d.name, d.text).WithHint("agent-sessionizer recordings play --help")
		}
		*d.to = parsed
	}
	if !app.Interactive() {
		return fail.New(fail.Usage, "recordings play needs a terminal").WithHint("agent-sessionizer recordings export %s", short(id))
	}
	h, err := a.Host(ctx)
	if err != nil {
		return err
	}
	r, err := h.Read(ctx, ops.File{Recording: id, Format: ops.Asciicast})
	if err != nil {
		return err
	}
	defer r.Close()
	return playOnTerminal(ctx, a, p, r)
}

// playOnTerminal plays a recording on the user's terminal, and resets the terminal.
func playOnTerminal(ctx context.Context, a *app.App, p player, r io.Reader) error {
	width, height, events, err := recording.ReadCast(r)
	if err != nil {
		return err
	}
	if w, h, err := term.GetSize(int(os.Stdout.Fd())); err == nil && (w < width || h < height) {
		a.Con.Warn("the recording is %dx%d, but this terminal is only %dx%d: enlarge it to see everything", width, height, w, h)
	}
	saved, err := term.MakeRaw(int(os.Stdin.Fd()))
	if err != nil {
		return fail.New(fail.Host, "put the terminal into raw mode: %w", err)
	}
	defer func() { _ = term.Restore(int(os.Stdin.Fd()), saved) }()
	p.keys = readKeys(os.Stdin)
	screen := termtext.NewReplayFilter(os.Stdout)
	defer func() { _, _ = io.WriteString(os.Stdout, resetScreen) }()
	return p.play(ctx, screen, events)
}

// resetScreen undoes what a replay may have set: the alternate screen, margins, character sets, modes and colours.
// Resetting the margins moves the cursor.
const resetScreen = "\x1b[?1049l\x1b7\x1b[?69l\x1b[r\x1b8\x1b[?5l\x1b[?6l\x1b[?7h\x1b[?12l\x1b[?25h\x1b[?2026l\x1b[4l\x1b(B\x1b)B\x0f\x1b[0 q\x1b[0m\r\n"

// readKeys returns the keys that are pressed. The reading goroutine ends with the process.
func readKeys(tty io.Reader) <-chan byte {
	keys := make(chan byte)
	go func() {
		defer close(keys)
		var key [1]byte
		for {
			if n, err := tty.Read(key[:]); n == 0 || err != nil {
				return
			}
			keys <- key[0]
		}
	}()
	return keys
}

const minSpeed, maxSpeed = 0.1, 1000

// player shows the events of a recording in their time.
type player struct {
	speed float64
	idle  time.Duration // longest pause
	at    time.Duration // what is earlier is shown immediately
	keys  <-chan byte

	paused bool
	ended  bool
}

// play shows the events until they end, or the user ends it.
func (p *player) play(ctx context.Context, screen io.Writer, events iter.Seq2[recording.Event, error]) error {
	last := p.at
	for e, err := range events {
		if err != nil {
			return err
		}
		if e.At > last {
			if err := p.wait(ctx, min(e.At-last, p.idle)); err != nil || p.ended {
				return err
			}
			last = e.At
		}
		if e.Kind != recording.Output { // only the user changes the size of the terminal
			continue
		}
		if _, err := io.WriteString(screen, e.Data); err != nil {
			return err
		}
	}
	return nil
}

// wait waits for a part of the recording's time, and obeys keys meanwhile.
func (p *player) wait(ctx context.Context, d time.Duration) error {
	for d > 0 || p.paused {
		began := time.Now()
		var over <-chan time.Time
		if !p.paused {
			timer := time.NewTimer(time.Duration(float64(d) / p.speed))
			defer timer.Stop()
			over = timer.C
		}
		select {
		case <-over:
			return nil
		case <-ctx.Done():
			return context.Cause(ctx)
		case key, ok := <-p.keys:
			if !p.paused {
				d -= time.Duration(float64(time.Since(began)) * p.speed)
			}
			if !ok { // no terminal any more
				p.keys, p.ended = nil, true
				return nil
			}
			if step := p.press(key); step || p.ended {
				return nil
			}
		}
	}
	return nil
}

// press obeys a key. It reports whether the next event is shown now.
func (p *player) press(key byte) (step bool) {
	switch key {
	case ' ':
		p.paused = !p.paused
	case '.':
		return p.paused
	case '+':
		p.speed = min(p.speed*2, maxSpeed)
	case '-':
		p.speed = max(p.speed/2, minSpeed)
	case 'q', 'Q', 3, 4, 27:
		p.ended = true
	}
	return false
}
