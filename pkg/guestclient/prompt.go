package guestclient

import (
	"context"
	"errors"
	"strings"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
)

// Prompt gives a text to the agent that runs in the guest, as if its user typed it. It returns
// fail.NotFound when no agent runs, and fail.Conflict when the agent waits for an answer.
func (g Guest) Prompt(ctx context.Context, text string) error {
	_, err := g.SSH.Output(ctx, g.program("prompt"), strings.NewReader(text), maxReply)
	if exit, ok := errors.AsType[*ssh.ExitError](err); ok {
		switch fail.Code(exit.Code) {
		case fail.NotFound:
			return fail.New(fail.NotFound, "no agent runs in the session's tmux")
		case fail.Conflict:
			return fail.New(fail.Conflict, "the agent waits for an answer, so it takes no prompt").WithHint("agent-sessionizer answer")
		}
	}
	if err != nil {
		return fail.New(fail.CodeOf(err), "send prompt: %w", err)
	}
	return nil
}
