// Package codexrun runs Codex without a terminal, and passes its questions to the host's user.
//
// `codex exec` cannot ask: it refuses what needs an approval. Codex's app server asks its client.
// It speaks JSON-RPC without the version field, one message per line on stdin and stdout, see
// https://developers.openai.com/codex/app-server.
package codexrun

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
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/observe"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/sys"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
)

const (
	maxMessage = 16 << 20         // bytes; a message contains all output of a command
	maxChanges = 64               // changes of files that wait for an approval
	endTime    = 10 * time.Second // for the app server to end after its turn
)

// printed lists the notifications that describe the turn. The others are parts of these, or
// describe the app server.
var printed = []string{"thread/started", "turn/started", "item/started", "item/completed", "thread/tokenUsage/updated", "turn/completed", "error", "warning"}

// message is a request, a response or a notification.
type message struct {
	ID     json.RawMessage `json:"id,omitempty"`
	Method string          `json:"method,omitempty"`
	Params json.RawMessage `json:"params,omitempty"`
	Result json.RawMessage `json:"result,omitempty"`
	Error  *rpcError       `json:"error,omitempty"`
}

type rpcError struct {
	Code    int    `json:"code"`
	Message string `json:"message"`
}

// notification has the parameters of notifications that are used here.
type notification struct {
	ThreadID  string          `json:"threadId"`
	RequestID json.RawMessage `json:"requestId"`
	Item      struct {
		Type    string `json:"type"`
		ID      string `json:"id"`
		Changes []struct {
			Path string `json:"path"`
		} `json:"changes"`
	} `json:"item"`
	Turn struct {
		Status string `json:"status"`
		Error  struct {
			Message string `json:"message"`
		} `json:"error"`
	} `json:"turn"`
}

// Options describe a run of Codex.
type Options struct {
	Model string // "" means Codex's default
}

// conversation is one thread of Codex with one turn.
type conversation struct {
	guest   sys.Guest
	options Options
	prompt  string
	out     io.Writer

	thread, turn string
	changes      map[string]string             // id of an item → the files that it changes
	asked        map[string]context.CancelFunc // id of a request → stops its question
	asking       sync.WaitGroup

	writing sync.Mutex
	stdin   io.WriteCloser
}

// Run runs Codex in the current directory until its turn ends, and prints the app server's
// notifications as JSON, one per line. Codex may only read without an approval. It fails if
// the turn does.
func Run(ctx context.Context, g sys.Guest, o Options, prompt string, out, errs io.Writer) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	cmd := exec.CommandContext(ctx, "codex", "app-server")
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = endTime
	// A hook of a Codex without a terminal must not look for a dialog in ours.
	cmd.Env = slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, "TMUX_PANE=") })
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
		return fail.New(fail.Host, "start Codex: %w", err)
	}
	c := &conversation{
		guest: g, options: o, prompt: prompt, out: out, stdin: stdin,
		changes: map[string]string{}, asked: map[string]context.CancelFunc{},
	}
	result := c.follow(ctx, stdout)
	for _, stop := range c.asked {
		stop()
	}
	c.asking.Wait()
	_ = stdin.Close() // ends the app server
	late := time.AfterFunc(endTime, cancel)
	defer late.Stop()
	_, _ = io.Copy(io.Discard, stdout)
	if err := cmd.Wait(); errors.Is(result, io.ErrUnexpectedEOF) {
		return fail.New(fail.Failure, "Codex ended before its turn: %w", cmp.Or(err, result))
	}
	return result
}

// follow starts the turn and reads messages until it has ended.
func (c *conversation) follow(ctx context.Context, in io.Reader) error {
	if err := c.request(initialize, "initialize", map[string]any{
		"clientInfo": map[string]any{"name": "agent-sessionizer", "version": "1"},
	}); err != nil {
		return err
	}
	lines := bufio.NewScanner(in)
	lines.Buffer(make([]byte, 0, 64<<10), maxMessage)
	for lines.Scan() {
		var m message
		if json.Unmarshal(lines.Bytes(), &m) != nil {
			continue
		}
		switch {
		case m.Method == "":
			if err := c.receive(m); err != nil {
				return err
			}
		case m.ID != nil:
			c.answer(ctx, m)
		default:
			if slices.Contains(printed, m.Method) {
				if _, err := fmt.Fprintf(c.out, "%s\n", lines.Bytes()); err != nil {
					return err
				}
			}
			if ended, err := c.note(m); ended {
				return err
			}
		}
	}
	return cmp.Or(lines.Err(), io.ErrUnexpectedEOF)
}

// Ids of the requests to the app server.
const (
	initialize  = 1
	startThread = 2
	startTurn   = 3
	steerTurn   = 4
)

func (c *conversation) request(id int, method string, params any) error {
	text, err := json.Marshal(params)
	if err != nil {
		return err
	}
	return c.send(message{ID: fmt.Append(nil, id), Method: method, Params: text})
}

func (c *conversation) send(m message) error {
	text, err := json.Marshal(m)
	if err != nil {
		return err
	}
	c.writing.Lock()
	defer c.writing.Unlock()
	_, err = c.stdin.Write(append(text, '\n'))
	return err
}

// receive handles the response to a request, each of which allows the next.
func (c *conversation) receive(m message) error {
	var id int
	_ = json.Unmarshal(m.ID, &id) // stays 0 if it is not an id of ours
	if id != initialize && id != startThread && id != startTurn {
		return nil // the turn may end before it is steered
	}
	if m.Error != nil {
		return fail.New(fail.Failure, "Codex refused to start: %s", guestproto.Clean(m.Error.Message))
	}
	var r struct {
		Thread, Turn struct {
			ID string `json:"id"`
		}
	}
	_ = json.Unmarshal(m.Result, &r) // what is missing, the next request is refused for
	switch id {
	case initialize:
		if err := c.send(message{Method: "initialized"}); err != nil {
			return err
		}
		params := map[string]any{"approvalPolicy": "on-request", "sandbox": "read-only"}
		if c.options.Model != "" {
			params["model"] = c.options.Model
		}
		return c.request(startThread, "thread/start", params)
	case startThread:
		c.thread = r.Thread.ID
		return c.request(startTurn, "turn/start", map[string]any{"threadId": c.thread, "input": input(c.prompt)})
	case startTurn:
		c.turn = r.Turn.ID
	}
	return nil
}

func input(text string) []map[string]string {
	return []map[string]string{{"type": "text", "text": text}}
}

// note takes what it needs from a notification, and reports whether the turn has ended.
func (c *conversation) note(m message) (ended bool, err error) {
	var n notification
	_ = json.Unmarshal(m.Params, &n) // a field of another type is not needed
	switch m.Method {
	case "item/started":
		if n.Item.Type == "fileChange" && len(c.changes) < maxChanges {
			var paths []string
			for _, one := range n.Item.Changes {
				paths = append(paths, one.Path)
			}
			c.changes[n.Item.ID] = strings.Join(paths, " ")
		}
	case "item/completed":
		delete(c.changes, n.Item.ID)
	case "serverRequest/resolved":
		if stop := c.asked[string(n.RequestID)]; stop != nil {
			stop()
			delete(c.asked, string(n.RequestID))
		}
	case "turn/completed":
		if n.ThreadID != c.thread { // of a subagent
			return false, nil
		}
		if n.Turn.Status == "completed" {
			return true, nil
		}
		return true, fail.New(fail.Failure, "the turn of Codex was not completed: %s", guestproto.Clean(cmp.Or(n.Turn.Error.Message, n.Turn.Status)))
	}
	return false, nil
}

// answer asks the host's user what the app server requests, and responds with the answer. It
// does not wait for it.
func (c *conversation) answer(ctx context.Context, m message) {
	r := readRequest(m)
	if item, ok := c.changes[r.ItemID]; ok {
		r.changes = item
	}
	q, ok := r.question()
	if !ok {
		_ = c.respond(m.ID, r.refusal()) // an app server that has ended needs none
		return
	}
	ctx, stop := context.WithCancel(ctx)
	c.asked[string(m.ID)] = stop
	c.asking.Go(func() {
		defer stop()
		answer, ok, err := observe.Await(ctx, c.guest, q)
		switch {
		case ctx.Err() != nil: // it no longer needs an answer
			return
		case err != nil || !ok:
			answer = guestproto.Deny
		}
		response, instead := r.response(answer)
		_ = c.respond(m.ID, response)
		if instead != "" {
			_ = c.request(steerTurn, "turn/steer", map[string]any{"threadId": r.ThreadID, "expectedTurnId": r.TurnID, "input": input(instead)})
		}
	})
}

// respond sends the result of a request of the app server, or an error.
func (c *conversation) respond(id json.RawMessage, result any) error {
	if refused, ok := result.(*rpcError); ok {
		return c.send(message{ID: id, Error: refused})
	}
	text, err := json.Marshal(result)
	if err != nil {
		return err
	}
	return c.send(message{ID: id, Result: text})
}
