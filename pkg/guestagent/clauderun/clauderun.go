// Package clauderun runs Claude Code without a terminal, and passes its questions to the host's
// user.
//
// Without a client that answers them, `claude --print` has no tools with which it asks its user or
// submits a plan. With `--permission-prompt-tool stdio` its client answers: it sends control
// requests on stdout, and reads the responses on stdin, each as one line of JSON, see
// https://code.claude.com/docs/en/agent-sdk/user-input.
package clauderun

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/observe"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/sys"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
)

const (
	maxMessage  = 16 << 20         // bytes of a line that is read; a longer one is only printed
	maxRequests = 64               // requests that wait for an answer
	endTime     = 30 * time.Second // for Claude Code to end after a signal
)

// message is what Claude Code and its client send each other, reduced to the fields that are
// used here.
type message struct {
	Type      string `json:"type"`
	RequestID string `json:"request_id"` // of a request, and of the cancellation of one
	Request   struct {
		Subtype string          `json:"subtype"`
		Tool    string          `json:"tool_name"`
		Input   json.RawMessage `json:"input"`
		AgentID string          `json:"agent_id"` // of a subagent
	} `json:"request"`
}

// Options describe a run of Claude Code.
type Options struct {
	Model    string // "" means Claude Code's default
	MaxTurns int    // 0 means no limit
	Tools    string // its built-in tools, separated by commas; "" means all
}

func (o Options) arguments() []string {
	args := []string{"--permission-mode", "default", "--permission-prompt-tool", "stdio", "--input-format", "stream-json", "--output-format", "stream-json", "--verbose", "--print"}
	if o.Model != "" {
		args = append(args, "--model", o.Model)
	}
	if o.MaxTurns > 0 {
		args = append(args, "--max-turns", strconv.Itoa(o.MaxTurns))
	}
	if o.Tools != "" {
		args = append(args, "--tools", o.Tools)
	}
	return args
}

// conversation is one run of Claude Code.
type conversation struct {
	guest sys.Guest
	agent sys.Process
	out   io.Writer

	asking sync.WaitGroup

	mu    sync.Mutex
	asked map[string]context.CancelFunc // id of a request → stops its question
	stdin io.WriteCloser
}

// Run runs Claude Code in the current directory until it has answered the prompt, and prints its
// output. It fails if Claude Code does.
func Run(ctx context.Context, g sys.Guest, o Options, prompt string, out, errs io.Writer) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	cmd := exec.CommandContext(ctx, "claude", o.arguments()...)
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = endTime
	cmd.Env = append(os.Environ(), observe.Runner+"="+strconv.Itoa(os.Getpid()))
	cmd.Stderr = errs
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return fail.New(fail.Host, "start Claude Code: %w", err)
	}
	agent, _ := sys.ProcessAt(cmd.Process.Pid)
	c := &conversation{guest: g, agent: agent, out: out, asked: map[string]context.CancelFunc{}, stdin: stdin}
	sent := c.send(map[string]any{"type": "user", "message": map[string]string{"role": "user", "content": prompt}})
	read := c.follow(ctx, stdout)
	if read != nil {
		cancel() // nothing reads its output
	}
	c.stop("")
	c.asking.Wait()
	if err := cmd.Wait(); err != nil {
		return fail.New(fail.Failure, "Claude Code failed: %w", cmp.Or(read, err))
	}
	return cmp.Or(read, sent)
}

// follow prints what Claude Code writes and answers its requests, until its output ends.
func (c *conversation) follow(ctx context.Context, in io.Reader) error {
	lines := bufio.NewReaderSize(in, 64<<10)
	var line []byte
	for {
		part, err := lines.ReadSlice('\n')
		if _, err := c.out.Write(part); err != nil {
			return err
		}
		if len(line) <= maxMessage {
			line = append(line, part...)
		}
		switch {
		case errors.Is(err, bufio.ErrBufferFull):
			continue
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return err
		}
		var m message
		if len(line) <= maxMessage && json.Unmarshal(line, &m) == nil {
			c.receive(ctx, m)
		}
		line = line[:0]
	}
}

func (c *conversation) receive(ctx context.Context, m message) {
	switch m.Type {
	case "control_request":
		c.answer(ctx, m)
	case "control_cancel_request":
		c.stop(m.RequestID)
	case "result":
		// It ends when it has done what it was sent until now, like after a prompt on its
		// command line.
		_ = c.stdin.Close()
	}
}

// stop ends the question of a request; "" ends all questions.
func (c *conversation) stop(request string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for id, stop := range c.asked {
		if id == request || request == "" {
			stop()
			delete(c.asked, id)
		}
	}
}

// begin returns a context that stop ends; ok is false if no person answers the request, or too many
// wait.
func (c *conversation) begin(ctx context.Context, m message) (_ context.Context, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if m.Request.Subtype != "can_use_tool" || len(c.asked) >= maxRequests {
		return ctx, false
	}
	ctx, c.asked[m.RequestID] = context.WithCancel(ctx)
	return ctx, true
}

// answer asks the host's user what Claude Code requests, and responds with the answer. It does not
// wait for it.
func (c *conversation) answer(ctx context.Context, m message) {
	ctx, ok := c.begin(ctx, m)
	if !ok {
		_ = c.respond(map[string]any{"subtype": "error", "request_id": m.RequestID, "error": "this client does not answer such a request"})
		return // a Claude Code that has ended needs no response
	}
	c.asking.Go(func() {
		r := m.Request
		decision, err := observe.DecideTool(ctx, c.guest, c.agent, observe.ToolUse{Tool: r.Tool, Input: r.Input, Subagent: r.AgentID})
		if ctx.Err() != nil { // it no longer needs an answer
			return
		}
		if err != nil {
			decision = map[string]any{"behavior": guestproto.Deny, "message": fmt.Sprintf("The user could not be asked: %v", err)}
		}
		c.stop(m.RequestID)
		_ = c.respond(map[string]any{"subtype": "success", "request_id": m.RequestID, "response": decision})
	})
}

func (c *conversation) respond(response map[string]any) error {
	return c.send(map[string]any{"type": "control_response", "response": response})
}

func (c *conversation) send(m map[string]any) error {
	text, err := json.Marshal(m)
	if err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	_, err = c.stdin.Write(append(text, '\n'))
	return err
}
