package session

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"strings"
	"sync"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ids"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/peercred"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/secret"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
)

// A task of a cluster may run on another host than the one on which it was submitted, and need secrets
// that only that host can resolve. This host's serve, which is connected to the cluster, gets them. A
// keeper asks serve over a socket, with a secretQuery, and receives a secretReply. Both are one line of
// JSON.

type secretQuery struct {
	Task string `json:"task"`
}

// secretReply has secrets as secret.Encode returns them, or why there are none.
type secretReply struct {
	Secrets []byte `json:"secrets,omitempty"`
	Code    string `json:"code,omitempty"`
	Error   string `json:"error,omitempty"`
	Hint    string `json:"hint,omitempty"`
}

const (
	submitterWait  = 2 * time.Minute // until the submitter's secrets must be here
	submitterPause = time.Second
	maxSecretQuery = 4 << 10
	maxSecretReply = 2 << 20 // bytes; what is sealed is smaller
	maxAskers      = 32
	askerTime      = 90 * time.Second // for one question and its answer
)

// askSubmitter gets secrets from the host on which their task was submitted. They are all of one task:
// that of the session, or the one at the top of its tree. While that host does not answer, askSubmitter
// reports why, and asks again.
func askSubmitter(ctx context.Context, socket string, refs []secret.Ref, wait time.Duration, report func(string)) (map[string]secret.Value, error) {
	if len(refs) == 0 {
		return map[string]secret.Value{}, nil
	}
	for began := time.Now(); ; {
		text, err := askServe(ctx, socket, refs[0].Task())
		switch {
		case err == nil:
			return secret.Decode(text, refs)
		case ctx.Err() != nil:
			return nil, context.Cause(ctx)
		case fail.CodeOf(err) != fail.Host || time.Since(began) > wait:
			names := make([]string, len(refs))
			for i, r := range refs {
				names[i] = r.Name
			}
			return nil, fail.New(fail.Secret, "get the secrets %s of the task: %w", strings.Join(names, ", "), err).WithHint("%s", fail.HintOf(err))
		}
		report("waiting for the secrets of the task: " + err.Error())
		select {
		case <-time.After(submitterPause):
		case <-ctx.Done():
		}
	}
}

// askServe asks serve once. An error with the code Host may be temporary.
func askServe(ctx context.Context, socket, task string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, askerTime)
	defer cancel()
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", socket)
	if err != nil {
		return nil, fail.New(fail.Host, "serve is not running on this host, or not connected to the cluster").WithHint("agent-sessionizer serve")
	}
	defer conn.Close()
	if err := peercred.Own(conn.(*net.UnixConn)); err != nil {
		return nil, err
	}
	defer context.AfterFunc(ctx, func() { _ = conn.Close() })() // also at the deadline
	var r secretReply
	err = json.NewEncoder(conn).Encode(secretQuery{task})
	if err == nil {
		err = json.NewDecoder(io.LimitReader(conn, maxSecretReply)).Decode(&r)
	}
	if err != nil { // which may quote the answer
		return nil, fail.New(fail.Host, "serve on this host did not answer")
	}
	if r.Error != "" {
		return nil, fail.New(fail.ParseCode(r.Code), "%s", r.Error).WithHint("%s", r.Hint)
	}
	return r.Secrets, nil
}

// ServeSecrets answers keepers of this host that ask for the secrets of a task, until ctx ends. The
// caller ensures that no other process listens on the socket.
func ServeSecrets(ctx context.Context, socket string, log *slog.Logger, get func(ctx context.Context, task string) ([]byte, error)) error {
	l, err := ssh.ListenRelay(socket)
	if err != nil {
		return fail.New(fail.Host, "listen for keepers: %w", err)
	}
	defer context.AfterFunc(ctx, func() { _ = l.Close() })()
	defer l.Close()
	var all sync.WaitGroup
	defer all.Wait()
	slots := make(chan struct{}, maxAskers)
	for {
		conn, err := l.AcceptUnix()
		if err != nil {
			if ctx.Err() != nil {
				return nil //nolint:nilerr // the end
			}
			return fail.New(fail.Host, "listen for keepers: %w", err)
		}
		if err := peercred.Own(conn); err != nil {
			log.WarnContext(ctx, "refused a connection to the socket for secrets", "error", err)
			_ = conn.Close()
			continue
		}
		slots <- struct{}{}
		all.Go(func() {
			defer func() { <-slots }()
			defer conn.Close()
			if err := answerKeeper(ctx, conn, get); err != nil && ctx.Err() == nil {
				log.WarnContext(ctx, "failed to answer a keeper that needs secrets", "error", err)
			}
		})
	}
}

func answerKeeper(ctx context.Context, conn net.Conn, get func(context.Context, string) ([]byte, error)) error {
	ctx, cancel := context.WithTimeout(ctx, askerTime)
	defer cancel()
	defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
	var q secretQuery
	if err := json.NewDecoder(io.LimitReader(conn, maxSecretQuery)).Decode(&q); err != nil {
		return err
	}
	var r secretReply
	var err error
	if !ids.Valid(q.Task) {
		err = errors.New("the question names no task")
	} else {
		r.Secrets, err = get(ctx, q.Task)
	}
	if err != nil {
		r = secretReply{Code: fail.CodeOf(err).String(), Error: err.Error(), Hint: fail.HintOf(err)}
	}
	if err := json.NewEncoder(conn).Encode(r); err != nil {
		return fmt.Errorf("send the answer: %w", err)
	}
	return nil
}
