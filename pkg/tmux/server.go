package tmux

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
)

// Server is the state of a tmux server at one moment. It is empty if no server runs.
type Server struct {
	Socket   string // its path, by which a process outside of the server finds it again
	Sessions []Info // those that we created, sorted by name

	version  string
	prefixes []string          // the user's own prefix keys, without duplicates
	here     string            // the key of the session that this process runs in
	clients  map[string]string // the keys of the sessions that clients show, by the client's name
}

// Look asks the server for its state, in one call.
func (c Client) Look(ctx context.Context) (Server, error) {
	const owner = "#{" + ownerOption + "}"
	show := func(text string) []string { return []string{"display-message", "-p", text} }
	out, err := c.run(ctx, nil,
		show("version #{version}"), show("socket #{socket_path}"), show("here "+owner),
		show("prefix"), []string{"show-options", "-gv", "prefix"}, []string{"show-options", "-gv", "prefix2"},
		[]string{"list-clients", "-F", "client " + owner + " #{client_name}"},
		[]string{"list-sessions", "-F", "session " + owner + " #{session_attached} #{session_name}"},
	)
	if noServer(err) {
		return Server{}, nil
	}
	if err != nil {
		return Server{}, fmt.Errorf("ask the tmux server: %w", err)
	}
	s := Server{clients: map[string]string{}}
	lines := strings.Split(out, "\n")
	for i, line := range lines {
		what, value, _ := strings.Cut(line, " ")
		switch what {
		case "version":
			s.version = value
		case "socket":
			s.Socket = value
		case "here":
			s.here = value
		case "prefix":
			for _, key := range lines[min(i+1, len(lines)):min(i+3, len(lines))] {
				if key != "" && key != "None" && !slices.Contains(s.prefixes, key) {
					s.prefixes = append(s.prefixes, key)
				}
			}
		case "client":
			key, name, _ := strings.Cut(value, " ")
			s.clients[name] = key
		case "session":
			if f := strings.SplitN(value, " ", 3); len(f) == 3 && f[0] != "" {
				attached, _ := strconv.Atoi(f[1])
				s.Sessions = append(s.Sessions, Info{Name: f[2], Key: f[0], Attached: attached})
			}
		}
	}
	slices.SortFunc(s.Sessions, func(a, b Info) int { return strings.Compare(a.Name, b.Name) })
	return s, nil
}

// Current returns the key of the session that a client shows, or "" when that is not
// one of ours. The client "" is the one that this process runs in; outside tmux it has
// none.
func (s Server) Current(client string) string {
	switch {
	case client != "":
		return s.clients[client]
	case os.Getenv("TMUX") != "":
		return s.here
	}
	return ""
}

// owner returns the key of a session, or "" when no session has that name or it is
// not ours.
func (s Server) owner(name string) string {
	for _, of := range s.Sessions {
		if of.Name == name {
			return of.Key
		}
	}
	return ""
}

func noServer(err error) bool {
	var serverErr *serverError
	return errors.As(err, &serverErr) && (strings.Contains(serverErr.text, "no server running") ||
		strings.Contains(serverErr.text, "error connecting") || strings.Contains(serverErr.text, "no sessions"))
}
