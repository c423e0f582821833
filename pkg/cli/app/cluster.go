package app

import (
	"cmp"
	"context"
	"fmt"
	"net/url"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/client"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/cluster"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fleet"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/server"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/task"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/termtext"
)

// clusterScheme precedes the name of a host of the cluster, where a context could have that name.
const clusterScheme = "cluster://"

// AskLimit is how long a command waits for what it asks of other hosts of the cluster.
const AskLimit = 3 * time.Second

// serveTarget returns the API of serve of this host, and through it that of another host of the
// cluster; host is "" for this one.
func serveTarget(p config.Paths, host string) client.Target {
	return client.Target{URL: (&url.URL{Scheme: "unix", Path: server.Socket(p.State)}).String(), Host: host}
}

// InServe performs an operation in serve of this host, for what only it can do.
func InServe[Request, Result any](ctx context.Context, a *App, op ops.Operation[Request, Result], r Request) (result Result, err error) {
	cfg, err := a.Settings()
	if err != nil {
		return result, err
	}
	serve, err := client.New(serveTarget(cfg.Paths, ""))
	if err != nil {
		return result, err
	}
	result, err = op.On(ctx, serve, r)
	if fail.CodeOf(err) == fail.Host && strings.HasPrefix(err.Error(), "reach ") {
		err = fail.New(fail.Host, "serve is not running on this host").WithHint("agent-sessionizer serve")
	}
	return result, err
}

// clusterOf returns this host's part in its cluster; false if it belongs to none.
func clusterOf(p config.Paths) (cluster.State, bool) {
	s, err := cluster.LoadState(p.Cluster())
	return s, err == nil && s.Certificate != ""
}

// clusterContext returns the context of a host of the cluster: the empty one for this host.
func clusterContext(p config.Paths, name string) (config.Context, error) {
	s, ok := clusterOf(p)
	if err := cluster.CheckName(name); err != nil || !ok {
		return config.Context{}, fail.New(fail.NotFound, "no host %q: this host belongs to no cluster", name).WithHint("agent-sessionizer cluster list")
	}
	if name == s.Name {
		return config.Context{}, nil
	}
	return config.Context{URL: clusterScheme + name}, nil
}

// otherHost is another host of the cluster.
type otherHost struct {
	*client.Client
	name string
}

func newOtherHost(p config.Paths, name string) (ops.Host, error) {
	c, err := client.New(serveTarget(p, name))
	if err != nil {
		return nil, err
	}
	return otherHost{c, name}, nil
}

// hosts are those of the cluster whose sessions commands of this host can use.
type hosts struct {
	own    string
	others []fleet.HostView
	paths  config.Paths
}

// hosts returns the hosts of the cluster if the command may use them: it works on this one, which no
// user chose with --host, and belongs to a cluster. Otherwise it returns false.
func (a *App) hosts(ctx context.Context, h ops.Host) (all hosts, ok bool, err error) {
	_, here := h.(ops.Engine)
	if !here || !a.AnyHost || cmp.Or(a.Chosen, os.Getenv(HostVariable)) != "" {
		return all, false, nil
	}
	cfg, err := a.Settings()
	if err != nil {
		return all, false, err
	}
	s, ok := clusterOf(cfg.Paths)
	if !ok || !s.Role.Allows(cluster.Member) {
		return all, false, nil
	}
	ctx, cancel := context.WithTimeout(ctx, AskLimit)
	defer cancel()
	list, err := InServe(ctx, a, ops.ListClusterHosts, struct{}{})
	if ctx.Err() != nil {
		err = fail.New(fail.Host, "serve did not answer within %v", AskLimit).WithHint("agent-sessionizer cluster list")
	}
	all = hosts{own: s.Name, paths: cfg.Paths}
	for _, is := range list.Hosts {
		if is.Name != s.Name && is.State != fleet.Removed && cluster.CheckName(is.Name) == nil {
			all.others = append(all.others, is)
		}
	}
	return all, true, err
}

// has reports whether the cluster has another host of that name.
func (all hosts) has(name string) bool {
	return slices.ContainsFunc(all.others, func(h fleet.HostView) bool { return h.Name == name })
}

// answer is what one host of the cluster answered.
type answer[T any] struct {
	name  string
	host  ops.Host
	value T
	err   error
}

// askAll asks all other hosts of the cluster at the same time. It reports those that do not answer
// in time, and leaves them out.
func askAll[T any](ctx context.Context, a *App, all hosts, ask func(context.Context, ops.Host) (T, error)) []answer[T] {
	return slices.DeleteFunc(askEach(ctx, all, ask), func(one answer[T]) bool {
		code := fail.CodeOf(one.err)
		silent := one.err != nil && (code == fail.Host || code == fail.Failure)
		if silent {
			a.Con.Say("host %s did not answer: %s", one.name, termtext.Line(one.err.Error()))
		}
		return silent
	})
}

// askEach asks all other hosts of the cluster at the same time.
func askEach[T any](ctx context.Context, all hosts, ask func(context.Context, ops.Host) (T, error)) []answer[T] {
	ctx, cancel := context.WithTimeout(ctx, AskLimit)
	defer cancel()
	answers := make([]answer[T], len(all.others))
	var asked sync.WaitGroup
	for i, is := range all.others {
		answers[i].name = is.Name
		if is.State == fleet.Silent || is.State == fleet.Revoked || is.State == fleet.Joined {
			answers[i].err = fail.New(fail.Host, "it is %s", is.State)
			continue
		}
		asked.Go(func() {
			if answers[i].host, answers[i].err = newOtherHost(all.paths, is.Name); answers[i].err == nil {
				answers[i].value, answers[i].err = ask(ctx, answers[i].host)
			}
		})
	}
	asked.Wait()
	return answers
}

// HostSession is a session and its host in the cluster.
type HostSession struct {
	session.View
	Host string `json:"host,omitempty"` // "" if this host belongs to no cluster

	At ops.Host `json:"-"`
}

// Sessions returns the sessions of h, and those of the other hosts if it is this host, and belongs to a
// cluster. It reports hosts that do not answer.
func (a *App) Sessions(ctx context.Context, h ops.Host) (sessions []HostSession, clustered bool, err error) {
	answers, clustered, err := everywhere(ctx, a, h, "sessions", listSessions)
	return sessionsOf(answers), clustered, err
}

// OtherSessions returns the sessions of the other hosts of the cluster that answer in time, by host. It leaves
// out names that no session has: a shell may get them.
func (a *App) OtherSessions(ctx context.Context) map[string][]session.View {
	all, _, err := a.hosts(ctx, ops.Engine{})
	if err != nil {
		return nil
	}
	by := map[string][]session.View{}
	for _, one := range askEach(ctx, all, listSessions) {
		if one.err == nil {
			by[one.name] = slices.DeleteFunc(one.value.Sessions, func(s session.View) bool {
				return cluster.CheckName(s.Name) != nil // the same form
			})
		}
	}
	return by
}

func listSessions(ctx context.Context, h ops.Host) (ops.SessionList, error) {
	return ops.ListSessions.On(ctx, h, struct{}{})
}

func sessionsOf(answers []answer[ops.SessionList]) []HostSession {
	sessions := []HostSession{}
	for _, one := range answers { // without an answer, there are none
		for _, s := range one.value.Sessions {
			sessions = append(sessions, HostSession{s, one.name, one.host})
		}
	}
	return sessions
}

// HostQuestion is a question and the host of its session in the cluster.
type HostQuestion struct {
	ops.Question
	Host string `json:"host,omitempty"` // "" if this host belongs to no cluster
}

// Questions returns the questions of the sessions that Sessions returns; with all, also those that have
// ended.
func (a *App) Questions(ctx context.Context, h ops.Host, all bool) (questions []HostQuestion, clustered bool, err error) {
	answers, clustered, err := everywhere(ctx, a, h, "questions", func(ctx context.Context, h ops.Host) (ops.QuestionList, error) {
		return ops.ListQuestions.On(ctx, h, ops.QuestionQuery{All: all})
	})
	questions = []HostQuestion{}
	for _, one := range answers {
		for _, q := range one.value.Questions {
			questions = append(questions, HostQuestion{q, one.name})
		}
	}
	return questions, clustered, err
}

// everywhere asks h for what is named, and also the other hosts of the cluster if h is this host, and belongs
// to one. It returns the answers, that of h first, and reports the hosts that gave none.
func everywhere[T any](ctx context.Context, a *App, h ops.Host, named string, ask func(context.Context, ops.Host) (T, error)) (answers []answer[T], clustered bool, err error) {
	own, err := ask(ctx, h)
	if err != nil {
		return nil, false, err
	}
	all, clustered, err := a.hosts(ctx, h)
	if err != nil { // what this host has does not need it
		a.Con.Say("the %s of other hosts are not shown: %s", named, termtext.Line(err.Error()))
	}
	answers = []answer[T]{{name: all.own, host: h, value: own}}
	for _, one := range askAll(ctx, a, all, ask) {
		if one.err == nil {
			answers = append(answers, one)
		}
	}
	return answers, clustered, nil
}

// OnHost returns the host on which what is, if it has the form HOST:NAME, and the name. For any other
// text, it returns h and the text.
func (a *App) OnHost(ctx context.Context, h ops.Host, what string) (ops.Host, string, error) {
	name, rest, ok := strings.Cut(what, ":")
	if !ok || rest == "" || strings.HasPrefix(rest, "/") || cluster.CheckName(name) != nil {
		return h, what, nil //nolint:nilerr // it has another form
	}
	all, ok, err := a.hosts(ctx, h)
	switch {
	case err != nil:
		return nil, "", fmt.Errorf("look for host %s: %w", name, err)
	case ok && name == all.own:
		return h, rest, nil
	}
	if !all.has(name) {
		return h, what, nil // perhaps the URL of a repository
	}
	on, err := newOtherHost(all.paths, name)
	return on, rest, err
}

// IsHost reports whether name is that of a host of the cluster that this host may use.
func (a *App) IsHost(ctx context.Context, name string) bool {
	if to, err := Context(a); err != nil || to.URL != "" || cluster.CheckName(name) != nil {
		return false
	}
	all, ok, err := a.hosts(ctx, ops.Engine{})
	return err == nil && ok && (all.has(name) || name == all.own)
}

// Find finds a session as FindSession does, or as FindExact does if exact is set. Beyond them, it
// understands HOST:NAME for a session of another host of the cluster, and looks for a name that is
// unknown here on all of them.
func (a *App) Find(ctx context.Context, h ops.Host, what string, exact bool) (ops.Host, session.View, error) {
	r := ops.FindRequest{Gone: exact}
	return find(ctx, a, h, what, "list", func(ctx context.Context, h ops.Host, name string) (session.View, error) {
		r := r
		r.Name = name
		return findSession(ctx, h, r)
	}, func(s session.View) string {
		if s.State == session.Gone {
			return ""
		}
		return s.Name
	})
}

// FindQuestion finds a question as the operation of that name does, on all hosts on which Find finds sessions.
func (a *App) FindQuestion(ctx context.Context, h ops.Host, what string, answer bool) (ops.Host, ops.Question, error) {
	return find(ctx, a, h, what, "answer", func(ctx context.Context, h ops.Host, name string) (ops.Question, error) {
		return ops.FindQuestion.On(ctx, h, ops.FindQuestionRequest{What: name, Answer: answer})
	}, func(q ops.Question) string { return q.ID })
}

// find asks h for what, or the host that what names. If h does not know it, find asks the other hosts, of which
// only one may know it. nameOf returns "" for what does not count there. The command list shows all.
func find[T any](ctx context.Context, a *App, h ops.Host, what, list string, ask func(context.Context, ops.Host, string) (T, error), nameOf func(T) string) (on ops.Host, found T, err error) {
	var none T
	h, name, err := a.OnHost(ctx, h, what)
	if err != nil {
		return nil, none, err
	}
	found, err = ask(ctx, h, name)
	if fail.CodeOf(err) != fail.NotFound || name != what {
		return h, found, err
	}
	all, _, herr := a.hosts(ctx, h)
	if herr != nil { // what is missing is what the user named
		return h, found, err
	}
	on = h
	var names []string
	for _, one := range askAll(ctx, a, all, func(ctx context.Context, h ops.Host) (T, error) { return ask(ctx, h, what) }) {
		switch {
		case fail.CodeOf(one.err) == fail.NotFound, one.err == nil && nameOf(one.value) == "":
		case one.err != nil: // there are several on that host
			return nil, none, fail.New(fail.CodeOf(one.err), "host %s: %w", one.name, one.err).WithHint("agent-sessionizer %s", list)
		default:
			on, found, err = one.host, one.value, nil
			names = append(names, one.name+":"+nameOf(one.value))
		}
	}
	if len(names) > 1 {
		return nil, none, fail.New(fail.Usage, "%q could be any of %s", what, strings.Join(names, ", ")).WithHint("agent-sessionizer %s", list)
	}
	return on, found, err
}

// TaskHost returns the host that has the files of a task which h knows: another host of the cluster while
// the task runs there. Once it has ended, serve of this host gets them from the cluster.
func (a *App) TaskHost(h ops.Host, t task.View) (ops.Host, error) {
	if _, here := h.(ops.Engine); !here || t.Host == "" {
		return h, nil
	}
	cfg, err := a.Settings()
	if err != nil {
		return nil, err
	}
	if t.State.Over() {
		return client.New(serveTarget(cfg.Paths, ""))
	}
	return newOtherHost(cfg.Paths, t.Host)
}

// AnyOf is the value of --on that leaves the choice of the host to the program.
const AnyOf = "any"

// ChooseHost returns the host for a new session: the one of that name, or with AnyOf the one with the
// most free memory among those that have the image and take tasks, or if none has it, among all.
func (a *App) ChooseHost(ctx context.Context, h ops.Host, name, image string) (ops.Host, error) {
	all, ok, err := a.hosts(ctx, h)
	if err != nil {
		return nil, err
	}
	if !ok {
		return nil, fail.New(fail.Usage, "--on needs a cluster in which this host is a member, and not another --host").WithHint("agent-sessionizer cluster list")
	}
	if name == AnyOf {
		list, err := InServe(ctx, a, ops.ListClusterHosts, struct{}{})
		if err != nil {
			return nil, err
		}
		if name, err = leastLoaded(list.Hosts, all.own, image); err != nil {
			return nil, err
		}
	}
	if name == all.own {
		return h, nil
	}
	if !all.has(name) {
		return nil, fail.New(fail.NotFound, "no host %q in the cluster", name).WithHint("agent-sessionizer cluster list")
	}
	return newOtherHost(all.paths, name)
}

// leastLoaded returns the name of the host that is best for a new session of an image. If several
// are equal, it is own.
func leastLoaded(all []fleet.HostView, own, image string) (string, error) {
	has := func(h fleet.HostView) bool {
		return slices.ContainsFunc(h.Images, func(name string) bool { return name == image || strings.HasPrefix(name, image+".") })
	}
	var best fleet.HostView
	for _, h := range all {
		better := best.Name == "" || has(h) && !has(best) ||
			has(h) == has(best) && (h.FreeMemory > best.FreeMemory || h.FreeMemory == best.FreeMemory && h.Name == own)
		if h.State == fleet.Up && better {
			best = h
		}
	}
	if best.Name == "" {
		return "", fail.New(fail.Host, "no host of the cluster is up").WithHint("agent-sessionizer cluster list")
	}
	return best.Name, nil
}

// ClusterHosts returns the names of all hosts of the cluster, for completion.
func ClusterHosts(ctx context.Context, a *App) (names []string) {
	cfg, err := a.Settings()
	if err != nil {
		return nil
	}
	if _, ok := clusterOf(cfg.Paths); !ok {
		return nil
	}
	list, _ := InServe(ctx, a, ops.ListClusterHosts, struct{}{}) // on error there are none to offer
	for _, h := range list.Hosts {
		if h.State != fleet.Removed {
			names = append(names, h.Name+"\t"+string(h.State))
		}
	}
	return names
}
