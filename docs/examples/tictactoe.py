"""Environments for ENVIRONMENT=docs/examples/tictactoe.py:Random, or :Perfect: tic-tac-toe.

The policy is x and begins. The environment shows the board row by row, `x.o.x...o`. An answer is a
free field, 1 to 9. The reward is 1 for a win, 0.5 for a draw, else 0: an illegal move loses.
"""

import functools
import random

LINES = [(0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6)]


def winner(board):
    """Return x or o if one has a line, "draw" if the board is full, else ""."""
    for a, b, c in LINES:
        if board[a] == board[b] == board[c] != ".":
            return board[a]
    return "" if "." in board else "draw"


def moves(board, player):
    """Return the boards to which a player may move, by field."""
    free = [place for place in range(9) if board[place] == "."]
    return {place: board[:place] + player + board[place + 1 :] for place in free}


@functools.cache
def value(board, player):
    """Return what x reaches if both play perfectly and `player` moves: 1, 0 or -1."""
    if winner(board):
        return {"x": 1, "o": -1}.get(winner(board), 0)
    if player == "x":
        return max(value(after, "o") for after in moves(board, "x").values())
    return min(value(after, "x") for after in moves(board, "o").values())


class Random:
    """A game against a player whose moves are random."""

    def reset(self, seed):
        """Begin a game; return its number and the empty board."""
        self.rng = random.Random(seed)
        self.board = "." * 9
        return f"{seed % 1000}: {self.board}"

    def answer(self):
        """Return the board after the environment's move."""
        return self.rng.choice(list(moves(self.board, "o").values()))

    def step(self, text):
        """Return the board after a move and the answer to it, the reward, and whether it is over."""
        boards = {str(place + 1): after for place, after in moves(self.board, "x").items()}
        if text.strip() not in boards:
            return "", 0.0, True
        self.board = boards[text.strip()]
        if not winner(self.board):
            self.board = self.answer()
        reward = {"x": 1.0, "draw": 0.5}.get(winner(self.board), 0.0)
        return self.board, reward, bool(winner(self.board))


class Perfect(Random):
    """A game against a player that never loses."""

    def answer(self):
        """Return a board from which the policy reaches least."""
        boards = list(moves(self.board, "o").values())
        return min(boards, key=lambda board: (value(board, "x"), self.rng.random()))
