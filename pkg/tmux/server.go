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

// ServerState is what a tmux server reported at one moment. It is empty if no server runs.
type ServerState struct {
	Socket   string // path of the server's socket; processes outside of tmux need it to find the server
	Sessions []Info // the sessions that we created, sorted by name

	version  string
	prefixes []string          // the user's own prefix keys, without duplicates
	here     string            // key of the session that this process runs in
	clients  map[string]string // for each client, by its name, the key of the session that it shows
}

// ReadState reads the server's state, with one call of tmux. It does not start a server.
func (c Client) ReadState(ctx context.Context) (ServerState, error) {
	s, err := c.readState(ctx)
	if err != nil {
		return s, fmt.Errorf("read state of the tmux server: %w", err)
	}
	return s, nil
}

// readState reads the state, and then runs the commands cmds, in one call of tmux.
func (c Client) readState(ctx context.Context, cmds ...[]string) (ServerState, error) {
	const owner = "#{" + ownerOption + "}"
	show := func(text string) []string { return []string{"display-message", "-p", text} }
	out, err := c.run(ctx, nil, append([][]string{
		show("version #{version}"), show("socket #{socket_path}"), show("here " + owner),
		show("prefix"),
		{"show-options", "-gv", "prefix"},
		{"show-options", "-gv", "prefix2"},
		{"list-clients", "-F", "client " + owner + " #{client_name}"},
		{"list-sessions", "-F", "session " + owner + " #{session_attached} #{session_name}"},
	}, cmds...)...)
	if noServer(err) {
		return ServerState{}, nil
	}
	if err != nil {
		return ServerState{}, err
	}
	s := ServerState{clients: map[string]string{}}
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

// Current returns the key of the session that a client shows, or "" if that session is not
// ours. If client is "", Current uses the client that this process runs in, if any.
func (s ServerState) Current(client string) string {
	switch {
	case client != "":
		return s.clients[client]
	case os.Getenv("TMUX") != "":
		return s.here
	}
	return ""
}

// owner returns the key of one of our sessions, or "" if none of them has that name.
func (s ServerState) owner(name string) string {
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
