//go:build fault

package fault

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

// asking returns a task that asks a question, and goes on when the file GO exists. The test answers
// it in the given way.
func asking(name string, way func(w *world) answerer) kase {
	agent := guestAgent + ` ask "Go on?" >>"${RUNS%RUNS}ANSWERS"; until [ -e "${RUNS%RUNS}GO" ]; do sleep 0.1; done; echo work >>input.txt; ` + commit
	return kase{name, agent, "", func(w *world, _ string) error { return w.answerOnce(way(w)) }, "COMPLETED", 1}
}

// asked is a question as its user sees it.
type asked struct{ ID, State, Answer string }

// reply is what became of an answer.
type reply int

const (
	unknown  reply = iota // the process that took it was killed
	accepted              // this answer counts
	refused               // another one was first
)

// answerer is a way to answer questions.
type answerer interface {
	give(id, text string) (reply, error)
	questions() ([]asked, error) // all, also those that have ended
	close() error
}

// answerOnce answers the question of the task's agent, and again after each answer that may be
// lost. Then exactly one answer must have counted, and the agent must have got that one.
func (w *world) answerOnce(way answerer) (err error) {
	defer func() { err = errors.Join(err, way.close()) }()
	q, err := w.question(way, "open")
	if err != nil {
		return err
	}
	w.begin()
	var given []string
	for got := unknown; got == unknown; {
		if len(given) == 3 {
			return errors.New("one process was killed, and three answers got lost")
		}
		given = append(given, fmt.Sprintf("answer %d", len(given)+1))
		if got, err = way.give(q.ID, given[len(given)-1]); err != nil {
			return err
		}
		if got == accepted {
			w.answer = given[len(given)-1]
		}
	}
	end, err := w.question(way, "delivered")
	if err != nil {
		return err
	}
	if w.answer == "" {
		w.answer = end.Answer
		given = given[:len(given)-1] // the last was refused
	}
	if end.ID != q.ID || end.Answer != w.answer || !slices.Contains(given, end.Answer) {
		return fmt.Errorf("the answer to %s = %+v, want one of %q, and %q if it was accepted", q.ID, end, given, w.answer)
	}
	if got, err := way.give(q.ID, "too late"); err != nil || got != refused {
		return fmt.Errorf("a second answer = %d, %w, want refused", got, err)
	}
	dir := filepath.Join(w.home, ".agent-vms/*/root/run/agent/questions/*")
	w.wait("the agent to take the answer", func() bool { return len(w.answers()) > 0 })
	w.wait("the guest to remove the question", func() bool {
		files, _ := filepath.Glob(dir)
		return len(files) == 1 && strings.HasSuffix(files[0], ".taken")
	})
	w.finish()
	w.write("GO", "")
	return nil
}

// question waits until the only question has the state.
func (w *world) question(way answerer, state string) (asked, error) {
	var list []asked
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); time.Sleep(50 * time.Millisecond) {
		var err error
		if list, err = way.questions(); err != nil {
			return asked{}, err
		}
		switch {
		case len(list) > 1:
			return asked{}, fmt.Errorf("one question has %d rows: %+v", len(list), list)
		case len(list) == 1 && list[0].State == state:
			return list[0], nil
		case len(list) == 1 && list[0].State == "closed":
			return asked{}, fmt.Errorf("question = %+v, want it %s", list[0], state)
		}
	}
	return asked{}, fmt.Errorf("questions = %+v, want one that is %s", list, state)
}

// answers returns what the agent got.
func (w *world) answers() string {
	text, _ := os.ReadFile(filepath.Join(w.home, "ANSWERS"))
	return string(text)
}

// checkAnswer checks at the end of a task that its question, if it had one, was asked and
// answered once.
func (w *world) checkAnswer() error {
	if w.answer == "" {
		return nil
	}
	if got := w.answers(); got != w.answer+"\n" {
		return fmt.Errorf("the agent got %q, want %q once", got, w.answer)
	}
	end, err := w.question(byCommand(w), "delivered")
	if err == nil && end.Answer != w.answer {
		err = fmt.Errorf("at the end the question is %+v, want the answer %q", end, w.answer)
	}
	return err
}

// commandAnswerer answers with the command.
type commandAnswerer struct{ w *world }

func byCommand(w *world) answerer { return commandAnswerer{w} }

func (c commandAnswerer) give(id, text string) (reply, error) {
	_, err := c.w.run(c.w.plan, "agent-sessionizer", "answer", id, text)
	switch {
	case err == nil:
		return accepted, nil
	case strings.Contains(err.Error(), "signal: killed"):
		return unknown, nil
	case strings.Contains(err.Error(), "exit status 4") && strings.Contains(err.Error(), "already answered"):
		return refused, nil
	}
	return unknown, err
}

func (c commandAnswerer) questions() (list []asked, err error) {
	out, err := c.w.run(nil, "agent-sessionizer", "answer", "--all", "--json")
	if err == nil {
		err = json.Unmarshal([]byte(out), &list)
	}
	return list, err
}

func (commandAnswerer) close() error { return nil }

// serveAnswerer answers over the API of a serve that it starts, and starts again when it is killed. It
// uses no command, so serve alone must restart what was killed.
type serveAnswerer struct {
	w      *world
	client *http.Client
	log    bytes.Buffer
	cmd    *exec.Cmd
	ended  chan struct{}
}

func byServe(w *world) answerer {
	return &serveAnswerer{w: w, client: &http.Client{Timeout: time.Minute, Transport: &http.Transport{
		DisableKeepAlives: true, // each serve has its own connections
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", filepath.Join(w.state(), "agent-sessionizer/serve.sock"))
		},
	}}}
}

// start starts serve unless it runs.
func (s *serveAnswerer) start() error {
	if s.cmd != nil {
		select {
		case <-s.ended:
			if s.cmd.ProcessState.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
				return fmt.Errorf("serve ended: %v\n%s", s.cmd.ProcessState, &s.log)
			}
		default:
			return nil
		}
	}
	s.log.Reset()
	s.cmd, s.ended = exec.Command(program, "serve"), make(chan struct{})
	s.cmd.Dir, s.cmd.Env = s.w.home, slices.Concat(s.w.env, s.w.plan)
	s.cmd.Stdout, s.cmd.Stderr = &s.log, &s.log
	if err := s.cmd.Start(); err != nil {
		return err
	}
	go func(cmd *exec.Cmd, ended chan struct{}) {
		_ = cmd.Wait() // how it ended is in ProcessState
		close(ended)
	}(s.cmd, s.ended)
	return nil
}

// send sends a request to serve. The status is 0 if serve was killed before it answered.
func (s *serveAnswerer) send(method, path, body string) (status int, data []byte, err error) {
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		if err := s.start(); err != nil {
			return 0, nil, err
		}
		r, err := http.NewRequest(method, "http://localhost/api/v1/hitl"+path, strings.NewReader(body))
		if err != nil {
			return 0, nil, err
		}
		r.Header.Set("Content-Type", "application/json")
		response, err := s.client.Do(r)
		if errors.Is(err, syscall.ENOENT) || errors.Is(err, syscall.ECONNREFUSED) {
			continue // serve does not listen yet
		}
		if err == nil {
			status = response.StatusCode
			data, err = io.ReadAll(response.Body)
			_ = response.Body.Close()
		}
		if err == nil {
			return status, data, nil
		}
		select {
		case <-s.ended:
			return 0, nil, nil
		case <-time.After(10 * time.Second):
			return 0, nil, fmt.Errorf("serve runs, and does not answer: %w", err)
		}
	}
	return 0, nil, fmt.Errorf("serve does not listen\n%s", &s.log)
}

func (s *serveAnswerer) give(id, text string) (reply, error) {
	status, data, err := s.send(http.MethodPost, "/"+id+"/respond", fmt.Sprintf(`{"answer": %q}`, text))
	switch {
	case err != nil || status == 0:
		return unknown, err
	case status == http.StatusOK:
		return accepted, nil
	case status == http.StatusConflict && strings.Contains(string(data), "already answered"):
		return refused, nil
	}
	return unknown, fmt.Errorf("answer over the API: status %d: %s", status, data)
}

func (s *serveAnswerer) questions() ([]asked, error) {
	status, data, err := s.send(http.MethodGet, "?all=true", "")
	if err != nil || status == 0 {
		return nil, err
	}
	var list struct{ Questions []asked }
	if err := json.Unmarshal(data, &list); err != nil || status != http.StatusOK {
		return nil, fmt.Errorf("list questions: status %d: %w: %s", status, err, data)
	}
	return list.Questions, nil
}

func (s *serveAnswerer) close() error {
	if s.cmd == nil {
		return nil
	}
	_ = s.cmd.Process.Signal(syscall.SIGTERM) // fails if it was killed
	select {
	case <-s.ended:
		return nil
	case <-time.After(patience):
		return fmt.Errorf("serve does not end\n%s", &s.log)
	}
}

// cut breaks the connections to all guests.
func (w *world) cut() { w.signal(syscall.SIGUSR1, isVM) }

// askingCases are the cases with a question, by the command whose process takes the answer.
var askingCases = map[string]kase{
	"answer": asking("question", byCommand),
	"serve":  asking("question over the API", byServe),
}

// TestAnswersArriveOnce kills the processes that carry an answer at each of their marks: the one that takes
// it, which is the command or serve, and the keepers. Or it cuts the connection to the guest there, or kills
// them all while the answer is being taken.
func TestAnswersArriveOnce(t *testing.T) {
	marks := slices.Concat(commits, files)
	if testing.Short() {
		marks = commits
	}
	for taker, k := range askingCases {
		who := []string{taker, "keeper", "task-keeper"}
		// Until the question is asked, the keepers write the same in both cases.
		trouble{name: "killed", kase: k, who: who, marks: marks, step: every(1), core: testing.Short() || taker == "serve"}.everywhere(t)
		trouble{name: "connection cut", kase: k, who: who, marks: marks, step: every(1), core: true, act: (*world).cut}.everywhere(t)
		trouble{
			name: "all killed", kase: k, who: who[:1], marks: marks, step: 1, act: func(w *world) {
				w.signal(syscall.SIGKILL, func(line string) bool { return isKeeper(line) || strings.Contains(line, " "+taker+" ") })
			},
		}.everywhere(t)
	}
}

// TestAnswersArriveOnceAtMoments kills what carries an answer, or cuts the connection, at moments after the
// answer was saved, because no mark shows when it is sent to the guest.
func TestAnswersArriveOnceAtMoments(t *testing.T) {
	isReporter := func(line string) bool { return strings.Contains(line, "agent-guest watch") }
	faults := []struct {
		name      string
		now, then func(w *world)
	}{
		{"keepers killed", nil, func(w *world) { w.signal(syscall.SIGKILL, isKeeper) }},
		{"connection cut", nil, (*world).cut},
		{"hanging connection cut", func(w *world) { w.signal(syscall.SIGSTOP, isVM) }, func(w *world) { w.cut(); w.signal(syscall.SIGCONT, isVM) }},
		// It never reads an answer that was sent meanwhile.
		{"hanging reporter of the guest killed", func(w *world) { w.signal(syscall.SIGSTOP, isReporter) }, func(w *world) { w.signal(syscall.SIGKILL, isReporter) }},
	}
	for taker, k := range askingCases {
		want := calmly(t, k).ending
		for _, fault := range faults {
			moments := some(30)
			eachAtOnce(moments, func(i int) {
				at := 800 * time.Millisecond * time.Duration(i) / time.Duration(moments) // after that it has long arrived
				w := newWorld(t)
				defer w.remove()
				b := w.breakAt(taker, "after-commit", 1, func(w *world) {
					if fault.now != nil {
						fault.now(w)
					}
					w.later(at, func() { fault.then(w) })
				})
				w.plan = []string{b.env}
				got, err := w.play(k)
				if !b.came() {
					t.Errorf("%s: the answer was not saved, want a fault after it", k.name)
				}
				disturbed(t, w, fmt.Sprintf("%s, %s %v after the answer", k.name, fault.name, at), got, want, err)
			})
		}
	}
}

// TestCascadesUnderFaults kills the command that cancels a task, and the keepers of each level, at each
// of their marks after the cancellation began.
func TestCascadesUnderFaults(t *testing.T) {
	who := []string{"task"}
	for level := 1; level <= 3; level++ {
		if testing.Short() && level != 2 {
			continue
		}
		who = append(who, fmt.Sprintf("task-keeper#%d", level), fmt.Sprintf("keeper#%d", level))
	}
	trouble{name: "killed", kase: cascade, who: who, marks: slices.Concat(commits, files), step: every(1), core: true}.everywhere(t)
}
