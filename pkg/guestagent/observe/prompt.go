package observe

import (
	"context"
	"io"
	"strings"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/sys"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
)

// pasteBuffer is the tmux buffer from which texts are pasted.
const pasteBuffer = "agent-guest"

// keyPause is how long a program has to draw what the next key is for.
const keyPause = 500 * time.Millisecond

// typing is a sequence of tmux commands.
type typing [][]string

func pressKey(pane, key string) []string { return []string{"send-keys", "-t", pane, key} }

// pasteText returns the commands that paste a text into a pane and send it.
func pasteText(pane, text string) typing {
	return typing{
		{"set-buffer", "-b", pasteBuffer, "--", text}, {"paste-buffer", "-p", "-d", "-b", pasteBuffer, "-t", pane}, pressKey(pane, "Enter"),
	}
}

// run runs the commands, with a pause between them.
func (t typing) run(ctx context.Context) error {
	for i, args := range t {
		if i > 0 {
			time.Sleep(keyPause)
		}
		if _, err := tmux(ctx, args...); err != nil {
			return err
		}
	}
	return nil
}

// Prompt gives a text to the agent that runs in the guest's tmux, as if its user typed it: to
// the one that needs its user most, if several run. An agent that waits for an answer gets no
// prompt, because the text would be taken for the answer.
func Prompt(ctx context.Context, g sys.Guest, in io.Reader) error {
	data, err := io.ReadAll(io.LimitReader(in, guestproto.MaxPromptText*4+1))
	if err != nil {
		return fail.New(fail.Host, "prompt: read text: %w", err)
	}
	text := guestproto.CleanLines(string(data), guestproto.MaxPromptText)
	if strings.TrimSpace(text) == "" {
		return fail.New(fail.Usage, "prompt: the text must not be empty")
	}
	w := newWatcher(g, Options{}, io.Discard)
	w.poll(time.Now())
	list, err := tmux(ctx, "list-panes", "-a", "-F", paneFormat)
	if err != nil {
		return fail.New(fail.NotFound, "prompt: no tmux server runs")
	}
	panes := panesOf(list)
	for _, a := range w.sortedAgents() {
		p, ok := paneOf(panes, a.PID)
		switch {
		case !ok || a.State == guestproto.AgentGone:
			continue
		case a.State == guestproto.AgentBlocked:
			return fail.New(fail.Conflict, "prompt: %s waits for an answer", a.Name)
		}
		return pasteText(p.id, text).run(ctx)
	}
	return fail.New(fail.NotFound, "prompt: no agent runs in tmux")
}
